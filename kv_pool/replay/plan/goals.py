"""`PlanGoal`: what a plan is for: a hit rate, an amount of memory, or a price."""

import re
from dataclasses import dataclass
from math import isfinite

from kv_pool.errors import InvalidArgumentError

_PARTS = ("gpu", "host", "disk", "prefill", "gpu-hour")
PRICE_FORMAT = "gpu=0.03,host=0.004,disk=0.0001,prefill=0.02"


@dataclass(frozen=True)
class Prices:
    """Prices in one currency.

    Attributes:
        gpu: of a GiB of GPU memory for an hour.
        prefill: of a million computed prompt tokens.
        host, disk: of a GiB of these for an hour; None if no such tier is wanted.
    """

    gpu: float
    prefill: float
    host: float | None = None
    disk: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not (value > 0 and isfinite(value)):
                raise InvalidArgumentError(f"the price {name} is {value}; it must be above 0")


@dataclass(frozen=True)
class PlanGoal:
    """The goal of a plan: one of a hit rate, a memory or prices. Without any, it is the knee of the curve.

    Attributes:
        target_hit_rate: the least capacity with this token hit rate, above 0 and below 1.
        memory_bytes: what this memory gives, and what more or less of it would change.
        prices: the capacity at which savings minus costs are largest.
    """

    target_hit_rate: float | None = None
    memory_bytes: int | None = None
    prices: Prices | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None]
        if len(given) > 1:
            raise InvalidArgumentError(f"a plan has one goal, not {' and '.join(given)}")
        if self.target_hit_rate is not None and not 0 < self.target_hit_rate < 1:
            raise InvalidArgumentError(
                f"target_hit_rate is {self.target_hit_rate}; it must be above 0 and below 1"
            )

    @property
    def name(self) -> str:
        """`target`, `memory`, `price` or `knee`."""
        if self.target_hit_rate is not None:
            return "target"
        if self.memory_bytes is not None:
            return "memory"
        return "knee" if self.prices is None else "price"


def parse_share(text: str) -> float:
    """Return the number of a share such as `0.35` or `35%`. Raises InvalidArgumentError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*", text)
    if found is None:
        raise InvalidArgumentError(f"{text!r} is not a share; write it as 0.35 or 35%")
    return float(found[1]) / (100 if found[2] else 1)


def parse_prices(text: str, prefill_tokens_per_s: float) -> Prices:
    """Return the prices of a text such as `gpu=0.03,host=0.004,prefill=0.02`.

    The price of computation is either `prefill`, of a million tokens, or `gpu-hour`, of an hour in which
    `prefill_tokens_per_s` are computed.

    Raises:
        InvalidArgumentError: a part is not known, is missing, occurs twice, or is not a number above 0.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in _PARTS or name in found:
            raise InvalidArgumentError(
                f"{part!r} is not a price; {', '.join(_PARTS)} are, each at most once: {PRICE_FORMAT}"
            )
        try:
            found[name] = float(value)
        except ValueError as error:
            raise InvalidArgumentError(
                f"{value!r} is not a number; write prices as {PRICE_FORMAT}"
            ) from error
    if "gpu" not in found or ("prefill" in found) == ("gpu-hour" in found):
        raise InvalidArgumentError(
            f"{text!r} needs gpu, and either prefill or gpu-hour: {PRICE_FORMAT}, where gpu, host and disk "
            "are per GiB and hour, and prefill per million tokens"
        )
    prefill = found.get("prefill")
    if prefill is None:
        prefill = found["gpu-hour"] / (prefill_tokens_per_s * 3600) * 1e6
    return Prices(found["gpu"], prefill, found.get("host"), found.get("disk"))
