"""`read_prompts`: the only reading of a trace for its curves: the pieces of all prompts, or of a sample.

`UnitFinder` finds the conversation of each prompt, and `Sampler` chooses conversations, in disjoint groups.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from os.path import commonprefix

import xxhash

from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.curves.reuse import PromptKeys, Reuse, ReuseRecorder, find_key_bytes, read_prompt_keys
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.trace import Trace

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

    def __init__(self, settings: ReplaySettings, trace: Trace, block_size: int) -> None:
        key_bytes = find_key_bytes(trace, block_size)
        first = list(islice(read_prompt_keys(settings, trace, block_size), _REQUESTS_TO_CHOOSE_UNIT))
        self.unit = "session" if all(prompt.session_id is not None for prompt in first) else "root"
        # The root comes after the blocks that all these prompts begin with.
        num_common = len(commonprefix([prompt.keys for prompt in first])) // key_bytes  # noqa: RUF071, no paths
        self._root = slice(num_common * key_bytes, (num_common + 1) * key_bytes)

    def find(self, prompt: PromptKeys) -> bytes:
        """Return the session or the root of a prompt; empty if it has none."""
        if self.unit == "session":
            return (prompt.session_id or "").encode("utf-8", "surrogatepass")
        return prompt.keys[self._root]


class Sampler(UnitFinder):
    """Chooses prompts by the hash of their unit: all or none of a unit's prompts are in the sample.

    Args:
        rate: share of units in the sample, above 0 and below 1.
    Raises:
        InvalidArgumentError: the rate is not a share.
        TraceError: the trace cannot be read.
    """

    def __init__(self, settings: ReplaySettings, trace: Trace, block_size: int, rate: float) -> None:
        if not 0 < rate < 1:
            raise InvalidArgumentError(f"the sample's rate is {rate}; it must be above 0 and below 1")
        super().__init__(settings, trace, block_size)
        self.rate = rate

    def find_group(self, prompt: PromptKeys) -> int | None:
        """Return the number of the prompt's group, 0 to NUM_GROUPS - 1; None if it is not in the sample."""
        share = xxhash.xxh3_64_intdigest(self.find(prompt)) / 2**64
        return int(share / self.rate * NUM_GROUPS) if share < self.rate else None


@dataclass(frozen=True)
class ReadPrompts:
    """The result of one reading of a trace: its totals, and the pieces of prompts that curves are made of.

    Attributes:
        num_blocks: blocks of each request, of the whole trace.
        blocks_looked_up, tokens_in: cacheable blocks and tokens of all prompts, of the whole trace.
        reuse: the pieces of all prompts, or of the sample.
        groups: the pieces of the disjoint parts of the sample; empty without a sample.
        num_generated: full blocks of generated tokens, of the whole trace.
        span_ms: time from the first to the last arrival.
    """

    num_blocks: "array[int]"
    blocks_looked_up: int
    tokens_in: int
    reuse: Reuse
    groups: list[Reuse]
    num_generated: int
    span_ms: float


def read_prompts(
    settings: ReplaySettings,
    trace: Trace,
    block_size: int,
    sampler: Sampler | None,
    on_progress: Callable[[float], None],
    *,
    has_output: bool = False,
) -> ReadPrompts:
    """Read a trace once.

    Args:
        sampler: chooses the prompts; None for all.
        on_progress: called with the share of the trace that is read, after every 100 requests.
        has_output: the blocks of generated tokens are cached after those of the prompt.
    Raises:
        TraceError: the trace cannot be read, or its ids do not identify prefixes.
        InvalidArgumentError: fewer than two groups of the sample have requests.
    """
    key_bytes = find_key_bytes(trace, block_size)
    recorder = ReuseRecorder(block_size, key_bytes)
    group_recorders = [ReuseRecorder(block_size, key_bytes) for _ in range(NUM_GROUPS if sampler else 0)]
    num_blocks = array("q")
    blocks_looked_up = tokens_in = num_generated = 0
    first_ms, last_ms = float("inf"), 0.0
    for prompt in read_prompt_keys(settings, trace, block_size):
        if len(num_blocks) % _REQUESTS_BETWEEN_PROGRESS == 0:
            on_progress(max(trace.position, len(num_blocks) / settings.limit if settings.limit else 0.0))
        first_ms, last_ms = min(first_ms, prompt.arrival_ms), max(last_ms, prompt.arrival_ms)
        if has_output:
            num_tokens = prompt.num_tokens + prompt.output_length
            num_generated += num_tokens // block_size - prompt.num_cacheable
            prompt.num_cacheable = num_tokens // block_size
            prompt.num_blocks = -(-num_tokens // block_size)
        num_blocks.append(prompt.num_blocks)
        blocks_looked_up += prompt.num_cacheable
        tokens_in += prompt.input_length
        if sampler is not None:
            group = sampler.find_group(prompt)
            if group is None:
                continue
            group_recorders[group].add(prompt)
        recorder.add(prompt)
    groups = [found for each in group_recorders if len(found := each.finish())]
    if sampler is not None and len(groups) < 2:
        raise InvalidArgumentError(
            f"the sample at rate {sampler.rate} has {len(groups)} of {NUM_GROUPS} groups of {sampler.unit}s, "
            "and an estimate of its error needs 2; use a larger rate"
        )
    return ReadPrompts(
        num_blocks,
        blocks_looked_up,
        tokens_in,
        recorder.finish(),
        groups,
        num_generated,
        max(0.0, last_ms - first_ms),
    )
