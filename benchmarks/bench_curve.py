"""Time `kv-pool curve` on a generated trace of long agent sessions. See benchmarks/README.md."""

import random
import resource
import tempfile
import time
from pathlib import Path

from measuring import make_parser, read_options, run_child, start_run, write_results

BLOCK_SIZE = 64
NUM_TURNS = 60
SYSTEM_BLOCKS = 230
NUM_SYSTEM_PROMPTS = 8
NEW_BLOCKS = (28, 142)  # per turn
NUM_ACTIVE = 60
MEASURE = """
import json, sys
from kv_pool.lab import ReplaySettings, measure_curves
report = measure_curves(ReplaySettings(sys.argv[1], 1))
print(json.dumps({
    "read_seconds": report.read_seconds,
    "lru_seconds": report.lru_seconds,
    "optimum_seconds": report.optimum_seconds,
    "capacities": len(report.points),
    "requests": report.requests,
    "block_references": report.blocks_looked_up,
    "distinct_blocks": report.infinite_cache.num_blocks,
    "largest_request": report.largest_request,
    "infinite_token_hit_rate": report.infinite_cache.token_hit_rate,
}))
"""


class Session:
    """A conversation of an agent: prompts grow; a few branch off or start over."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.number = number
        self.rng = rng
        first = rng.randrange(NUM_SYSTEM_PROMPTS) * SYSTEM_BLOCKS
        self.system = list(range(first, first + SYSTEM_BLOCKS))
        self.ids = list(self.system)
        self.turns_left = NUM_TURNS

    def prompt(self, next_id: int) -> tuple[list[int], int]:
        """Return the ids of the next prompt, and the next unused id."""
        self.turns_left -= 1
        chance = self.rng.random()
        if chance < 0.01:  # compaction: a new, short history
            self.ids = list(self.system)
        elif chance < 0.06:  # an earlier turn is edited
            del self.ids[max(len(self.system), len(self.ids) - self.rng.randrange(200)) :]
        num_new = self.rng.randint(*NEW_BLOCKS)
        self.ids += range(next_id, next_id + num_new)
        return self.ids, next_id + num_new


def write_trace(path: Path, num_requests: int, seed: int) -> None:
    """Write a trace of sessions, of which NUM_ACTIVE are active at a time, one line per request."""
    rng = random.Random(seed)
    next_id = NUM_SYSTEM_PROMPTS * SYSTEM_BLOCKS
    active: list[Session] = []
    num_sessions = 0
    with path.open("w", buffering=1 << 22) as file:
        for number in range(num_requests):
            if len(active) < NUM_ACTIVE:
                active.append(Session(num_sessions, rng))
                num_sessions += 1
            session = rng.choice(active)
            ids, next_id = session.prompt(next_id)
            input_length = len(ids) * BLOCK_SIZE + rng.randrange(BLOCK_SIZE)
            file.write(
                f'{{"timestamp":{number * 100},"input_length":{input_length},"output_length":300,'
                f'"session_id":"{session.number}","hash_ids":[{",".join(map(str, ids))}]}}\n'
            )
            if not session.turns_left:
                active.remove(session)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=60_000)
    parser.add_argument("--keep", help="write the trace to this file, or use it if it exists")
    options = read_options(parser)
    provenance = start_run(options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.keep or Path(folder) / "trace.jsonl")
        if not path.exists():
            write_trace(path, options.requests, options.seed)
        started = time.perf_counter()
        result = {
            **run_child("-c", MEASURE, str(path)),
            "wall_seconds": time.perf_counter() - started,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
            "trace_bytes": path.stat().st_size,
        }
    for name, value in result.items():
        print(f"{name:24} {value:,.3f}" if isinstance(value, float) else f"{name:24} {value}")
    write_results(options, {"provenance": provenance, **result})


if __name__ == "__main__":
    main()
