"""`CompareSettings`: what a comparison runs, as it is written to its JSON."""

from dataclasses import replace

import msgspec

from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.settings import OPTIMUM, ReplaySettings

LRU = "lru"


class ComparedTrace(msgspec.Struct, frozen=True):
    """One trace of a comparison.

    Attributes:
        settings: the settings of all its replays; `num_blocks` and `policy` are replaced.
        capacities: in blocks.
    """

    settings: ReplaySettings
    capacities: tuple[int, ...]


class CompareSettings(msgspec.Struct, frozen=True):
    """The settings of a comparison.

    Attributes:
        traces: each is replayed with each policy at each of its capacities.
        policies: names as in `find_policy`. LRU, the optimum and the ceiling are in every comparison.
        resamples: number of samples for each confidence interval; 0 for no intervals.
        seed: seed of the samples.
    """

    traces: tuple[ComparedTrace, ...]
    policies: tuple[str, ...]
    resamples: int = 1000
    seed: int = 0

    def check(self) -> None:
        """Raise InvalidArgumentError if a value is invalid."""
        if not self.traces:
            raise InvalidArgumentError("a comparison needs at least one trace")
        if self.resamples < 0:
            raise InvalidArgumentError(f"resamples is {self.resamples}; it must be 0 or more")
        for compared in self.traces:
            settings = compared.settings
            if not compared.capacities:
                raise InvalidArgumentError(f"{settings.trace}: a comparison needs at least one capacity")
            if (
                settings.policy != LRU
                or settings.keep_session_s
                or settings.keep_prefix_tokens
                or settings.by
            ):
                raise InvalidArgumentError(
                    "a comparison sets the cache policy itself, and takes no keep_sessions, keep_prefix or by"
                )
            for capacity in compared.capacities:
                replace(settings, num_blocks=capacity).check()

    def list_policies(self) -> list[str]:
        """Return the names of the policies to replay: LRU first, each once, without the optimum."""
        names = dict.fromkeys((LRU, *self.policies))
        names.pop(OPTIMUM, None)
        return list(names)
