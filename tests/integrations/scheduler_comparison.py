"""Compare vLLM's scheduler on two KV cache managers, step by step, over random engines; also a command.

    cd tests; python -m integrations.scheduler_comparison --level manager --seeds 1000 --steps 200

Compared after every operation: all fields of the scheduler's output (new requests with the block ids of each
group, new blocks of the running ones, numbers of tokens, preempted and finished requests, copies, blocks to
zero), the outputs to the clients with their statistics, KV events with all their fields, the calls of a KV
connector, each request's state and block table, the free queue in order, and the prefix map. At the end all
blocks must be free.
"""

import argparse
import logging
import sys
import time
import traceback
import warnings

from core.plain_operations import agree, find_differences
from integrations.scheduler_options import SCHEDULER_KINDS
from integrations.scheduler_schedule import SchedulerSchedule
from integrations.scheduler_side import LEVELS, SchedulerSide

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # for vLLM's imports
    import vllm
    from vllm.v1.core.kv_cache_manager import KVCacheManager

from kv_pool.integrations.vllm.releases import find_release

NUM_LINES = 8


class Comparison:
    """A seed of a kind. `difference` has the first difference, one line each; [] if there is none.

    `is_served` is False if our classes left the configuration to vLLM's own manager.
    """

    def __init__(self, kind, seed, names, num_steps, note=None, theirs="vllm"):
        """`names` has our classes, as for `SchedulerSide`; `note` gets each operation and its answer.

        `theirs` is the level to compare with.
        """
        self.schedule = SchedulerSchedule(kind, seed, find_release(vllm.__version__))
        self.num_steps = 0
        self.difference = []
        self.is_served = True
        theirs = SchedulerSide(self.schedule.options, LEVELS[theirs]())
        decisions = self.schedule.decide(num_steps)
        operation = next(decisions)
        try:
            ours = SchedulerSide(self.schedule.options, names)
        except Exception:
            self.fail("the constructor", traceback.format_exc().splitlines()[-NUM_LINES:])
            return
        self.is_served = not isinstance(ours.manager, KVCacheManager)
        while operation is not None:
            try:
                answer = theirs.apply(operation)
            except Exception:
                self.fail(operation, ["vLLM raises", *traceback.format_exc().splitlines()[-NUM_LINES:]])
                return
            self.num_steps += operation[0] == "schedule"
            try:
                lines = self.compare(answer, ours.apply(operation), theirs, ours)
            except Exception:
                lines = traceback.format_exc().splitlines()[-NUM_LINES:]
            if lines:
                self.fail(operation, lines)
                return
            if note is not None:
                note(operation, answer)
            operation = next_operation(decisions, answer)
        left = [f"theirs: {theirs.find_leaks()}, ours: {ours.find_leaks()}"]
        if left != ["theirs: [], ours: []"]:
            self.fail("the end", left)

    def compare(self, their_answer, our_answer, theirs, ours):
        if not agree(their_answer, our_answer):
            return list(find_differences(their_answer, our_answer))
        return list(find_differences(theirs.picture(), ours.picture()))

    def fail(self, operation, lines):
        self.difference = [
            f"options {self.schedule.options}",
            f"step {self.num_steps}, after {operation}",
            *lines[: NUM_LINES + 1],
        ]


def next_operation(decisions, answer):
    try:
        return decisions.send(answer)
    except StopIteration:
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", choices=list(LEVELS), default="pool", help="our classes")
    parser.add_argument("--kind", action="append", choices=SCHEDULER_KINDS, help="default: all kinds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds of each kind")
    parser.add_argument("--steps", type=int, default=200, help="steps of each seed")
    options = parser.parse_args()
    for name in ("vllm", "kv_pool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    names = LEVELS[options.level]()
    for kind in options.kind or SCHEDULER_KINDS:
        start, num_steps, num_served = time.monotonic(), 0, 0
        for seed in range(options.first, options.first + options.seeds):
            comparison = Comparison(kind, seed, names, options.steps)
            num_steps += comparison.num_steps
            num_served += comparison.is_served
            if comparison.difference:
                print(f"{kind}, seed {seed}:", *comparison.difference, sep="\n    ", flush=True)
                sys.exit(1)
        seconds = time.monotonic() - start
        counts = f"{options.seeds} seeds, {num_served} of them served by a manager of ours, {num_steps} steps"
        print(f"{kind}: {counts}, no difference ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
