"""The recipe of parity_with_vllm_0_30.jsonl.xz to ..._0_33.jsonl.xz: run this where that vLLM imports.

PYTHONPATH=tests:. python tests/core/data/record_parity.py tests/core/data/parity_with_vllm_0_33.jsonl.xz 120
PYTHONPATH=tests:. python tests/core/data/record_parity.py tests/core/data/parity_with_vllm_0_32.jsonl.xz 60

First line: where the recording comes from. Then one line a run, with the operations that a random schedule
decided, and what vLLM's classes answered to each: the result, the digest of everything observable after it
(`plain_operations.digest`), and at the end the picture itself. The last argument is the number of runs. The
same command makes the same runs. The recordings also have runs of a queue and a map, which are not replayed.
"""

import datetime
import json
import lzma
import platform
import sys

import vllm
from core import vllm_classes
from core.plain_operations import record
from core.pool_operations import PoolSide
from core.pool_schedule import PoolSchedule

from kv_pool.integrations.vllm.releases import find_release

NUM_STEPS = 200
FIRST_SEED = 5000


def make_lines(num_pools):
    yield {
        "recorded": "answers of vLLM's block pool to random operations",
        "recipe": "tests/core/data/record_parity.py",
        "vllm": vllm.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seeds": {"pool": [FIRST_SEED, FIRST_SEED + num_pools]},
        "num_steps": NUM_STEPS,
    }
    release = find_release(vllm.__version__)
    for seed in range(FIRST_SEED, FIRST_SEED + num_pools):
        schedule = PoolSchedule(seed, release)
        side = PoolSide(vllm_classes, schedule.options)
        yield {"subject": "pool", "seed": seed, **record(schedule, side, NUM_STEPS)}


def main(path, num_pools):
    with lzma.open(path, "wt", encoding="ascii", preset=9 | lzma.PRESET_EXTREME) as file:
        for line in make_lines(int(num_pools)):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
