"""`SaltRegion`: from which token on a prompt is private, and to whom."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_pool.core.arguments import as_list, check_type
from kv_pool.core.salt_regions import check_region


@dataclass(frozen=True)
class SaltRegion:
    """The tokens from `start` on are private: only requests with the same salt there share their blocks.

    A region ends where the next one starts, or with the request, generated tokens included. A block that any
    region touches is private; so are all blocks after it, because a hash covers all blocks before its own.

    Attributes:
        start: number of tokens before the region.
        salt: text, not empty, such as the id of a tenant. Secret if tenants can choose their own salts.

    Raises:
        InvalidTypeError: `start` is not an int, or `salt` not a string.
        InvalidArgumentError: `start` is negative, or `salt` is empty: a public region after a private one is
            impossible.
    """

    start: int
    salt: str

    def __post_init__(self) -> None:
        check_region(self.start, self.salt, 0)


def as_regions(regions: Sequence[SaltRegion]) -> tuple[SaltRegion, ...] | None:
    """Return the regions of a request as a tuple; None if there are none.

    Raises:
        InvalidTypeError: an element is not a `SaltRegion`.
        InvalidArgumentError: the starts do not increase.
    """
    least = 0
    listed = tuple(as_list("salt_regions", regions))
    for position, region in enumerate(listed):
        check_type(f"salt_regions[{position}]", region, SaltRegion)
        check_region(region.start, region.salt, least)
        least = region.start + 1
    return listed or None
