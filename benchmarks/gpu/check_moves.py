"""Do the measured moves of blocks on a GPU meet their targets?

    python benchmarks/gpu/check_moves.py FILE      written by bench_block_moves.py --device cuda:0 --json FILE

Targets: 1,000 blocks of 2 MiB in less than 5 ms, at 90 % of the rate of `copy_` or more, in every layout.
"""

import json
import sys
from pathlib import Path

NUM_MOVES = 1_000
BLOCK_BYTES = 2 * 2**20
MAX_MS = 5.0
MIN_SHARE = 0.9


def main() -> int:
    told = json.loads(Path(sys.argv[1]).read_text())
    gpu = told["provenance"].get("gpu")
    if gpu is None:
        print("measured on a CPU: there are no targets")
        return 0
    rows = [row for row in told["rows"] if row["block_bytes"] == BLOCK_BYTES]
    if not rows:
        print("no row of 2 MiB blocks")
        return 1
    num_short = 0
    for row in rows:
        figures = row["figures"]
        ours = figures["apply_moves, triton"]["median"]
        ms = ours * NUM_MOVES / row["num_moves"]
        share = figures["copy_, one call"]["median"] / ours
        is_met = ms < MAX_MS and share >= MIN_SHARE
        num_short += not is_met
        print(f"{'met' if is_met else 'MISSED':7}{ms:6.2f} ms, {share:4.0%} of copy_  {row['title']}")
    print(f"on {gpu}: {num_short} of the lines missed" if num_short else f"on {gpu}: all met")
    return 1 if num_short else 0


if __name__ == "__main__":
    sys.exit(main())
