"""`UnitFinder`: the conversation of each prompt. `Sampler`: a sample of conversations, in disjoint groups."""

from itertools import islice

import xxhash

from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.curves.prompt_keys import PromptKeys, find_key_bytes, read_prompt_keys
from kv_pool.replay.settings import ReplaySettings
from kv_pool.replay.trace import Trace

NUM_GROUPS = 8
_REQUESTS_TO_CHOOSE_UNIT = 1000


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
        self._key_bytes = find_key_bytes(trace, block_size)
        first = list(islice(read_prompt_keys(settings, trace, block_size), _REQUESTS_TO_CHOOSE_UNIT))
        self.unit = "session" if all(prompt.session_id is not None for prompt in first) else "root"
        self._num_common = _count_common(first, self._key_bytes)

    def find(self, prompt: PromptKeys) -> bytes:
        """Return the session or the root of a prompt; empty if it has none."""
        if self.unit == "session":
            return (prompt.session_id or "").encode("utf-8", "surrogatepass")
        start = self._num_common * self._key_bytes
        return prompt.keys[start : start + self._key_bytes]


class Sampler:
    """Chooses prompts by the hash of their unit: all or none of a unit's prompts are in the sample.

    Args:
        rate: share of units in the sample, above 0 and below 1.
    Raises:
        InvalidArgumentError: the rate is not a share.
        TraceError: the trace cannot be read.

    Attributes:
        unit: "session" or "root", as in `UnitFinder`.
    """

    def __init__(self, settings: ReplaySettings, trace: Trace, block_size: int, rate: float) -> None:
        if not 0 < rate < 1:
            raise InvalidArgumentError(f"the sample's rate is {rate}; it must be above 0 and below 1")
        self.rate = rate
        self._units = UnitFinder(settings, trace, block_size)
        self.unit = self._units.unit

    def find_group(self, prompt: PromptKeys) -> int | None:
        """Return the number of the prompt's group, 0 to NUM_GROUPS - 1; None if it is not in the sample."""
        share = xxhash.xxh3_64_intdigest(self._units.find(prompt)) / 2**64
        return int(share / self.rate * NUM_GROUPS) if share < self.rate else None


def _count_common(prompts: list[PromptKeys], key_bytes: int) -> int:
    """Return the number of leading blocks that all these prompts have in common."""
    num_common = 0
    while True:
        start = num_common * key_bytes
        keys = {prompt.keys[start : start + key_bytes] for prompt in prompts}
        if len(keys) != 1 or b"" in keys:
            return num_common
        num_common += 1
