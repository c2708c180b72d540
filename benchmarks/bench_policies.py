"""Measure what cache policies cost, per block of a prompt, against no policy. See benchmarks/README.md."""

from measuring import (
    Row,
    in_turn,
    make_parser,
    print_header,
    read_options,
    start_run,
    write_results,
)
from request_runs import read_fitting_requests, run_requests

from kv_pool import BlockPool
from kv_pool.core.policy_names import list_policies

NONE = "no policy"


def main() -> None:
    parser = make_parser(__doc__, runs=5, seeded=False)
    parser.add_argument("--trace", default="mooncake_conversation")
    parser.add_argument("--blocks", type=int, default=300_000, help="blocks of the pool")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument("--limit", type=int, default=2000, help="requests")
    parser.add_argument("--policy", action="append", help="default: all; may be repeated")
    options = read_options(parser)
    provenance = start_run(options)
    names = [NONE, *(options.policy or ["lru", *list_policies()])]
    requests = read_fitting_requests(options.trace, options.blocks, options.block_size, options.limit)
    row = Row("look up, allocate, cache, free", "ns/block", {name: [] for name in names}, NONE)
    hits: dict[str, int] = {}
    for run in range(options.runs):
        for name in in_turn(names, run):
            policy = None if name == NONE else name
            pool = BlockPool(options.blocks + 1, True, options.block_size, policy=policy)
            ns_per_block, hits[name] = run_requests(requests, pool)
            row.samples[name].append(ns_per_block)
    print_header("no policy / this")
    row.print()
    print("hit blocks: " + ", ".join(f"{name} {num_hits:,}" for name, num_hits in hits.items()))
    write_results(options, {"provenance": provenance, "rows": [row.to_json()], "hit_blocks": hits})


if __name__ == "__main__":
    main()
