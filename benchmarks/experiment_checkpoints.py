"""How many tokens does a hybrid model hit with few cached states? See benchmarks/README.md."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from measuring import make_parser, read_options, start_run, write_results
from request_runs import AGENTIC

import kv_pool
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import get_group_id
from kv_pool.core.kv_events import BlockStored
from kv_pool.ids import BlockHash, BlockHashWithGroupId, GroupId
from kv_pool.lab.driver import ReplayDriver
from kv_pool.lab.groups import PromptSteps, make_prefix_rules, parse_groups
from kv_pool.lab.replay_request import ReplayRequest
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.simulator import run_instantly
from kv_pool.lab.trace import Trace, TraceRequest
from kv_pool.manager.kv_cache_manager import KVCacheManager

STATE_GROUP = GroupId(1)
SIZES = [
    (64, 700_000),
    (64, 100_000),
    (64, 50_000),
    (528, 90_000),
    (528, 12_000),
    (1024, 45_000),
    (1024, 6_000),
]
"""Tokens per block, and blocks, of the replays of the agents' trace."""
RULES = ("blocks", "checkpoints", "bounded")
NUM_REQUESTS, NUM_PREFIXES, STEP_TOKENS, STATE_TOKENS = 64, 8, 100, 528
"""The workloads of vLLM issue 45238: 64 prompts over 8 prefixes, and a model with blocks of 528 tokens. The
lengths are multiples of 100 tokens."""


class StateCounter:
    """Counts cached states, as the lower tier of a pool that stores nothing.

    Attributes:
        num_stored: states cached so far.
        peak_held: most states cached at the end of a request.
        most_per_request: most states that one request cached.
    """

    def __init__(self) -> None:
        self.num_stored = self.peak_held = self.most_per_request = 0
        self._keys: dict[KVCacheBlock, Any] = {}
        self._num_before = 0

    def on_blocks_cached(
        self,
        request: Any,
        blocks: Sequence[KVCacheBlock],
        hashes: Sequence[BlockHash],
        num_cached_blocks: int,
        block_size: int,
        group_id: GroupId,
    ) -> None:
        if group_id == STATE_GROUP:
            for block in blocks:
                if not block.is_null:
                    self.num_stored += 1
                    self._keys[block] = block.key

    def on_blocks_reused(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            if block.key is not None and get_group_id(block.key) == STATE_GROUP:
                self._keys.pop(block, None)

    def on_block_arrived(
        self, block: KVCacheBlock, block_size: int | None, event: BlockStored | None
    ) -> None:
        pass

    def on_content_invalidated(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        pass

    def list_parents(self) -> dict[BlockHashWithGroupId, tuple[bytes | None, int]]:
        return {}

    def flush_evicted(self) -> None:
        pass

    def on_cache_reset(self) -> None:
        pass

    def end_request(self) -> None:
        """Update the peaks. States that were evicted without being reused are found by their keys."""
        self.most_per_request = max(self.most_per_request, self.num_stored - self._num_before)
        self._num_before = self.num_stored
        if len(self._keys) > self.peak_held:
            for block in [block for block, key in self._keys.items() if block.key != key]:
                del self._keys[block]
            self.peak_held = max(self.peak_held, len(self._keys))


@dataclass(frozen=True)
class Result:
    """The counts of one replay; `hits` counts requests with any cached token."""

    rule: str
    block_size: int
    num_blocks: int
    hits: int
    hit_tokens: int
    tokens: int
    stored: int
    held: int
    most_per_request: int


def replay(
    traced: Iterable[TraceRequest], rule: str, block_size: int, num_blocks: int, trace_block_size: int
) -> Result:
    """Replay requests through a full and a state group that share a pool, one request at a time."""
    counter = StateCounter()
    pool = kv_pool.BlockPool(num_blocks + 1, True, block_size)
    pool.lower_tiers = counter
    groups = parse_groups("full,mamba", block_size)
    manager = KVCacheManager(pool, groups=groups, prefix_rules=make_prefix_rules(rule))
    driver = ReplayDriver(manager, ReplaySettings("", num_blocks))
    report = driver.report
    num_hits = num_hit_tokens = 0

    def on_request() -> None:
        nonlocal num_hits, num_hit_tokens
        counter.end_request()
        num_hits += report.tokens_hit > num_hit_tokens
        num_hit_tokens = report.tokens_hit

    requests = (
        ReplayRequest.from_trace(one, block_size, trace_block_size=trace_block_size) for one in traced
    )
    steps = PromptSteps.for_groups(groups, None, at_every_block=rule == "blocks")
    run_instantly(requests, driver, on_request, steps)
    return Result(
        rule,
        block_size,
        num_blocks,
        num_hits,
        num_hit_tokens,
        report.tokens_in,
        counter.num_stored,
        counter.peak_held,
        counter.most_per_request,
    )


# ---- prefixes that several prompts share -----------------------------------------------------------


def make_shared_prefixes(num_shared: int, num_own: int, order: str, seed: int) -> Iterator[TraceRequest]:
    """Yield 64 prompts that share 8 prefixes. Lengths are in tokens.

    Args:
        order: of the prompts: `turns`, `groups` or `random`; `lengths` draws up to 200 tokens less, too.
    """
    rng = random.Random(seed)
    prefixes = [number % NUM_PREFIXES for number in range(NUM_REQUESTS)]
    if order == "groups":
        prefixes.sort()
    elif order != "turns":
        rng.shuffle(prefixes)
    for number, prefix in enumerate(prefixes):
        length = num_shared + num_own - (rng.randrange(200) if order == "lengths" else 0)
        shared = [prefix * 1000 + index for index in range(num_shared // STEP_TOKENS)]
        num_ids = -(-length // STEP_TOKENS)
        own = [(number + NUM_PREFIXES) * 1000 + index for index in range(num_ids - len(shared))]
        yield TraceRequest(number, 0.0, length, 0, shared + own, None)


def compare_shared_prefixes(num_seeds: int) -> list[dict[str, Any]]:
    """Print hits for each order of the prompts; the lowest and the highest over the seeds."""
    print(f"{NUM_REQUESTS} prompts, {NUM_PREFIXES} shared prefixes, blocks of {STATE_TOKENS} tokens")
    print(f"{'shared/own':<12}{'order':<10}{'rule':<13}{'hits':>8}{'hit tokens':>12}{'states/request':>16}")
    rows = []
    for num_shared, num_own in ((1600, 600), (1500, 700)):
        for order in ("turns", "groups", "random", "lengths"):
            for rule in RULES:
                results = [
                    replay(
                        make_shared_prefixes(num_shared, num_own, order, seed),
                        rule,
                        STATE_TOKENS,
                        10_000,
                        STEP_TOKENS,
                    )
                    for seed in range(1 if order in ("turns", "groups") else num_seeds)
                ]
                hits = sorted(result.hits for result in results)
                share = sum(result.hit_tokens for result in results) / sum(one.tokens for one in results)
                most = max(result.most_per_request for result in results)
                name = f"{num_shared}/{num_own}"
                rows.append(
                    {
                        "workload": name,
                        "order": order,
                        "rule": rule,
                        "hits": hits,
                        "share": share,
                        "most": most,
                    }
                )
                span = f"{hits[0]}" if hits[0] == hits[-1] else f"{hits[0]}-{hits[-1]}"
                print(f"{name:<12}{order:<10}{rule:<13}{span:>8}{share:>12.1%}{most:>16}")
    return rows


# ---- conversations of coding agents ----------------------------------------------------------------


def compare_agents(trace: Trace, limit: int | None, sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Print hits and states for each block size and capacity, also relative to a state at every block."""
    print(f"\n{trace.path.name}: tokens and states, and their share of those with a state at every block")
    print(
        f"{'block':>6}{'blocks':>10}  {'rule':<13}{'hit tokens':>11}{'share':>9}"
        f"{'stored':>9}{'share':>8}{'held':>8}{'share':>8}"
    )
    assert trace.block_size is not None
    traced = list(trace)[:limit]
    rows = []
    for block_size, num_blocks in sizes:
        dense = None
        for rule in RULES:
            result = replay(traced, rule, block_size, num_blocks, trace.block_size)
            dense = dense or result
            rows.append(asdict(result))
            print(
                f"{block_size:>6}{num_blocks:>10,}  {rule:<13}{result.hit_tokens / result.tokens:>11.2%}"
                f"{result.hit_tokens / dense.hit_tokens:>9.2%}{result.stored:>9,}"
                f"{result.stored / dense.stored:>8.2%}{result.held:>8,}{result.held / dense.held:>8.2%}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = make_parser(__doc__, seeded=False)
    parser.add_argument("--seeds", type=int, default=20, help="seeds of each random order")
    parser.add_argument("--limit", type=int, help="requests of the trace, from the start")
    options = read_options(parser, seeds=1, limit=60)
    provenance = start_run(options)
    prefixes = compare_shared_prefixes(options.seeds)
    agents = compare_agents(Trace(AGENTIC), options.limit, SIZES[:1] if options.quick else SIZES)
    write_results(options, {"provenance": provenance, "shared_prefixes": prefixes, "agents": agents})


if __name__ == "__main__":
    main()
