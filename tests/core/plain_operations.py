"""Calls as plain data: a name and JSON-compatible arguments, so that they can be recorded and replayed.

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
    """One implementation, driven by operations. A subclass has a method per operation name.

    The clock is stopped during an operation, so that two sides measure the same ages.
    """

    EXPECTED_ERRORS: ClassVar = {}  # operation -> errors that callers of vLLM may catch there

    def __init__(self, classes):
        self.classes = classes
        self.num_applied = 0

    def apply(self, operation):
        """Make the call and return its result as plain data; an error is named by its built-in bases."""
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
    """Return True if our answer equals theirs. An error of ours may have more base classes than theirs."""
    if has_raised(theirs) and has_raised(ours):
        return set(theirs["raises"]) <= set(ours["raises"])
    return theirs == ours


def digest(picture):
    """Return an 8-byte digest of a picture, in hex."""
    text = json.dumps(picture, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def hex_of(key):
    return None if key is None else key.hex()


def run(schedule, deciding, *others, num_steps):
    """Run `num_steps` operations on all sides, chosen by `schedule` from the answers of `deciding`.

    Yields the operation and the answers, in the order of the sides.
    """
    decisions = schedule.decide(deciding)
    operation = next(decisions)
    for _ in range(num_steps):
        answers = [side.apply(operation) for side in (deciding, *others)]
        yield operation, answers
        operation = decisions.send(answers[0])


def record(schedule, side, num_steps):
    """Return what a side answers to the operations of a schedule, as an object for JSON."""
    operations, answers, digests = [], [], []
    for operation, (answer,) in run(schedule, side, num_steps=num_steps):
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


def find_differences(theirs, ours, path=""):
    """Return the differences of two pictures, one line each."""
    if theirs == ours:
        return
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted(theirs.keys() | ours.keys()):
            yield from find_differences(theirs.get(name), ours.get(name), f"{path}/{name}")
    else:
        yield f"{path}: theirs {theirs}, ours {ours}"
