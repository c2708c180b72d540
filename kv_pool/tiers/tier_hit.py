"""`TierHit`: the part of a request's prefix that lower tiers have."""

from typing import NamedTuple

from kv_pool.ids import RequestId


class TierHit(NamedTuple):
    """The part of a request's prefix that lower tiers have, directly after the part on the device.

    Attributes:
        request_id: the request.
        num_device_tokens: number of tokens before it, which are on the device.
        num_tokens: number of tokens that the tiers have; 0 for a miss.
        num_tokens_by_medium: these tokens, counted under the lowest tier that must be read for them. Lists
            the media of all tiers.
    """

    request_id: RequestId
    num_device_tokens: int
    num_tokens: int
    num_tokens_by_medium: dict[str, int]
