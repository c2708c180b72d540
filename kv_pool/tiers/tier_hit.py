"""`TierHit`: what tiers have of a request."""

from typing import NamedTuple


class TierHit(NamedTuple):
    """What tiers have of a request, right after what the device has.

    Attributes:
        request_id: whose prefix it is.
        num_device_tokens: tokens in front of it, which are on the device.
        num_tokens: tokens that tiers have; 0 for none.
        num_tokens_by_medium: of these, by the coldest medium that is read for them; all media of tiers.
    """

    request_id: str
    num_device_tokens: int
    num_tokens: int
    num_tokens_by_medium: dict[str, int]
