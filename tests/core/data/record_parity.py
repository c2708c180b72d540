"""The recipe of parity_with_vllm_0_33.jsonl.xz: run this where vLLM 0.33.0 imports.

PYTHONPATH=tests:. python tests/core/data/record_parity.py tests/core/data/parity_with_vllm_0_33.jsonl.xz

First line: where the recording comes from. Then one line a run, with the operations that a random schedule
decided, and what vLLM's classes answered to each: the result, the digest of everything observable after it
(`plain_operations.digest`), and at the end the picture itself. The same command makes the same runs.
"""

import datetime
import json
import lzma
import platform
import sys

import vllm
from core import vllm_classes
from core.part_operations import PartSide
from core.part_schedule import PartSchedule
from core.plain_operations import digest, run
from core.pool_operations import PoolSide
from core.pool_schedule import PoolSchedule

NUM_STEPS = 200
SUBJECTS = (  # name, driver, schedule, seeds
    ("pool", PoolSide, PoolSchedule, range(5000, 5120)),
    ("parts", PartSide, PartSchedule, range(5000, 5020)),
)


def record(side_class, schedule):
    side = side_class(vllm_classes, schedule.options)
    operations, answers, digests = [], [], []
    for operation, (answer,) in run(schedule, side, num_steps=NUM_STEPS):
        # The schedule goes on changing its block tables, so what it decided is written down at once.
        operations.append(json.loads(json.dumps(operation)))
        answers.append(answer)
        digests.append(digest(side.picture()))
    return {
        "options": schedule.options,
        "operations": operations,
        "answers": answers,
        "digests": digests,
        "end": side.picture(),
    }


def make_lines():
    yield {
        "recorded": "answers of vLLM's block pool, free queue, prefix map and block to random operations",
        "recipe": "tests/core/data/record_parity.py",
        "vllm": vllm.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seeds": {subject: [seeds.start, seeds.stop] for subject, _, _, seeds in SUBJECTS},
        "num_steps": NUM_STEPS,
    }
    for subject, side_class, schedule_class, seeds in SUBJECTS:
        for seed in seeds:
            yield {"subject": subject, "seed": seed, **record(side_class, schedule_class(seed))}


def main(path):
    with lzma.open(path, "wt", encoding="ascii", preset=9 | lzma.PRESET_EXTREME) as file:
        for line in make_lines():
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
