"""Calls as plain data: a name and arguments that JSON can hold, so that they can be kept and made again.

["get_new_blocks", "gpu", 3]   is answered by   [1, 2, 3]
["get_new_blocks", "gpu", 99]  is answered by   {"raises": ["ValueError"]}
"""

import hashlib
import json
import time
from typing import ClassVar

FAMILIES = (ValueError, AssertionError, RuntimeError, OverflowError, AttributeError)
STEP_NS = 1_000_000_007


class Side:
    """One implementation, driven by operations. A subclass has a method for each of their names.

    Time stands still during an operation, so that two sides measure the same ages.
    """

    EXPECTED_ERRORS: ClassVar = {}  # operation -> what callers of vLLM may catch there

    def __init__(self, classes):
        self.classes = classes
        self.num_applied = 0

    def apply(self, operation):
        """Make the call. What comes back is plain data too; an error is named by its built-in families."""
        name, *arguments = operation
        self.num_applied += 1
        real_clock = time.monotonic_ns
        time.monotonic_ns = self.read_clock
        try:
            return getattr(self, name)(*arguments)
        except self.EXPECTED_ERRORS.get(name, ()) as error:
            return {"raises": [family.__name__ for family in FAMILIES if isinstance(error, family)]}
        finally:
            time.monotonic_ns = real_clock

    def read_clock(self):
        return self.num_applied * STEP_NS


def has_raised(answer):
    return isinstance(answer, dict) and "raises" in answer


def agree(theirs, ours):
    """Is our answer theirs? An error of ours may belong to more families than theirs."""
    if has_raised(theirs) and has_raised(ours):
        return set(theirs["raises"]) <= set(ours["raises"])
    return theirs == ours


def digest(picture):
    """Eight bytes, in hex, that stand for a picture."""
    text = json.dumps(picture, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def hex_of(key):
    return None if key is None else key.hex()


def run(schedule, deciding, *others, num_steps):
    """Let `schedule` decide `num_steps` operations, from what `deciding` answers, and make each on all sides.

    Yields the operation and the answers, in the order of the sides.
    """
    decisions = schedule.decide(deciding)
    operation = next(decisions)
    for _ in range(num_steps):
        answers = [side.apply(operation) for side in (deciding, *others)]
        yield operation, answers
        operation = decisions.send(answers[0])


def find_differences(theirs, ours, path=""):
    """Where two pictures differ, one line each."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted(theirs.keys() | ours.keys()):
            yield from find_differences(theirs.get(name), ours.get(name), f"{path}/{name}")
    elif theirs != ours:
        yield f"{path}: theirs {theirs}, ours {ours}"
