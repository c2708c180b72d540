"""The recipe of rules_of_vllm_0_33.jsonl.xz and its siblings: run this where that release of vLLM imports.

PYTHONPATH=tests:. python tests/manager/data/record_rules.py tests/manager/data/rules_of_vllm_0_33.jsonl.xz

First line: where the recording comes from. Then one line a run: the operations that a random schedule chose,
vLLM's result of each, the digest of the picture after each, and the last picture. The same command makes the
same runs.
"""

import datetime
import json
import lzma
import platform
import sys

import vllm
from core.plain_operations import record
from manager.manager_schedule import KINDS, ManagerSchedule
from manager.rule_options import NEWEST
from manager.vllm_manager import RELEASE, VllmManagerSide

NUM_STEPS = 120
# Fewer for an older release: what differs are states.
SEEDS_OF_KIND = {"full + mamba": range(5000, 5100 if RELEASE == NEWEST else 5040)}
SEEDS = range(5000, 5016 if RELEASE == NEWEST else 5003)


def make_lines():
    yield {
        "recorded": "answers of vLLM's KVCacheManager to random schedules, with its prefix cache settings",
        "recipe": "tests/manager/data/record_rules.py",
        "vllm": vllm.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "num_steps": NUM_STEPS,
    }
    for kind in KINDS:
        for seed in SEEDS_OF_KIND.get(kind, SEEDS):
            schedule = ManagerSchedule(kind, seed, True, RELEASE)
            side = VllmManagerSide(None, schedule.options)
            yield {"kind": kind, "seed": seed, **record(schedule, side, NUM_STEPS)}


def main(path):
    with lzma.open(path, "wt", encoding="ascii", preset=9 | lzma.PRESET_EXTREME) as file:
        for line in make_lines():
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
