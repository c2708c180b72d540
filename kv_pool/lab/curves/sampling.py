"""`read_prompts`: reads a trace for its curves: the pieces of all prompts, or of a sample of conversations.

All or none of the prompts of a conversation are in the sample, and in one of its disjoint groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from os.path import commonprefix

import xxhash

from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.curves.curve_report import CurveSample
from kv_pool.lab.curves.reuse import (
    PromptKeys,
    PromptSizes,
    Reuse,
    ReuseRecorder,
    find_key_bytes,
    read_prompt_keys,
)
from kv_pool.lab.settings import ReplayTrace

NUM_GROUPS = 8
_REQUESTS_TO_CHOOSE_UNIT = 1000
_REQUESTS_BETWEEN_PROGRESS = 100


class UnitFinder:
    """Finds the unit of each prompt.

    The unit is the session if the first 1,000 requests all have one. Otherwise it is the root: the first
    block that not all of these requests begin with, and so the first one after a system prompt.

    Raises:
        TraceError: the trace cannot be read.

    Attributes:
        unit: "session" or "root".
    """

    def __init__(self, trace: ReplayTrace) -> None:
        first = list(islice(read_prompt_keys(trace), _REQUESTS_TO_CHOOSE_UNIT))
        self.unit = "session" if all(prompt.session_id is not None for prompt in first) else "root"
        # The root comes after the blocks that all these prompts begin with.
        key_bytes = find_key_bytes(trace)
        num_common = len(commonprefix([prompt.keys for prompt in first])) // key_bytes  # noqa: RUF071, no paths
        self._root = slice(num_common * key_bytes, (num_common + 1) * key_bytes)

    def find(self, prompt: PromptKeys) -> bytes:
        """Return the session or the root of a prompt; empty if it has none."""
        if self.unit == "session":
            return (prompt.session_id or "").encode("utf-8", "surrogatepass")
        return prompt.keys[self._root]


@dataclass(frozen=True)
class ReadPrompts:
    """The result of one reading of a trace: its totals, and the pieces of prompts that curves are made of.

    Attributes:
        sizes: of each request of the whole trace.
        reuse: the pieces of all prompts, or of the sample.
        groups: the pieces of the disjoint parts of the sample; empty without a sample.
        sample: what is sampled; None for all prompts.
        span_ms: time from the first to the last arrival.
    """

    sizes: PromptSizes
    reuse: Reuse
    groups: list[Reuse]
    sample: CurveSample | None
    span_ms: float


def find_group(unit: bytes, rate: float) -> int | None:
    """Return the group of a unit by its hash, 0 to NUM_GROUPS - 1; None if it is not in the sample.

    Args:
        rate: share of units in the sample.
    """
    share = xxhash.xxh3_64_intdigest(unit) / 2**64
    return int(share / rate * NUM_GROUPS) if share < rate else None


def read_prompts(
    trace: ReplayTrace,
    on_progress: Callable[[float], None],
    *,
    rate: float | None = None,
    has_output: bool = False,
) -> ReadPrompts:
    """Read a trace once.

    Args:
        on_progress: called with the share of the trace that is read, after every 100 requests.
        rate: share of units in the sample, above 0 and below 1; None for all prompts.
        has_output: as in `read_prompt_keys`.
    Raises:
        TraceError: the trace cannot be read, or its ids do not identify prefixes.
        InvalidArgumentError: the rate is not a share, or fewer than two groups of the sample have requests.
    """
    if rate is not None and not 0 < rate < 1:
        raise InvalidArgumentError(f"the sample's rate is {rate}; it must be above 0 and below 1")
    finder = None if rate is None else UnitFinder(trace)
    key_bytes = find_key_bytes(trace)
    recorder = ReuseRecorder(trace.pool_block_size, key_bytes)
    group_recorders = [
        ReuseRecorder(trace.pool_block_size, key_bytes) for _ in range(NUM_GROUPS if finder else 0)
    ]
    sizes = PromptSizes()
    first_ms, last_ms = float("inf"), 0.0
    for number, prompt in enumerate(read_prompt_keys(trace, has_output=has_output)):
        if number % _REQUESTS_BETWEEN_PROGRESS == 0:
            on_progress(trace.find_share(number))
        first_ms, last_ms = min(first_ms, prompt.arrival_ms), max(last_ms, prompt.arrival_ms)
        sizes.append(prompt.size)
        if finder is not None and rate is not None:
            group = find_group(finder.find(prompt), rate)
            if group is None:
                continue
            group_recorders[group].add(prompt)
        recorder.add(prompt)
    groups = [found for each in group_recorders if len(found := each.finish())]
    if finder is not None and len(groups) < 2:
        raise InvalidArgumentError(
            f"the sample at rate {rate} has {len(groups)} of {NUM_GROUPS} groups of {finder.unit}s, and an "
            "estimate of its error needs 2; use a larger rate"
        )
    reuse, sample = recorder.finish(), None
    if finder is not None and rate is not None:
        sample = CurveSample(rate, finder.unit, len(reuse), len(groups))
    return ReadPrompts(sizes, reuse, groups, sample, max(0.0, last_ms - first_ms))
