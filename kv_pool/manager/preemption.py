"""Choose the request to preempt when no block is free, and how: recompute it later, or swap it out.

    running, first admitted first    a(1)  b(0)  c(1)  d(0)       priority in brackets; larger is kept longer
    preempted                         4th   2nd   3rd   1st

The last request in this order is never preempted, so it ends; then another one is the last. So every request
that fits into the pool alone ends, provided that each step serves the last to be preempted first. Admit no
request in a step that preempted one: it could take the blocks that were just released.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import GroupId
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import SchedulableRequest

R = TypeVar("R")


class PreemptionKind(Enum):
    """RECOMPUTE: release the blocks and recompute the tokens. SWAP: copy the blocks to the host and back."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True)
class PreemptionLoss:
    """The tokens and blocks that a preempted request loses.

    Attributes:
        num_computed_tokens: tokens whose KV is in the blocks.
        num_kept_tokens: leading tokens in cached blocks that other requests hold, too. While these requests
            run, none of these tokens is recomputed.
        num_cached_tokens: leading tokens in cached blocks, whether others hold them or not. They can be hit
            until the blocks are reused; in a pool without free blocks reuse starts at once, with the
            request's last blocks.
        num_blocks: most blocks that a swap copies out, and back in.
    """

    num_computed_tokens: int
    num_kept_tokens: int
    num_cached_tokens: int
    num_blocks: int


PreemptionRule = Callable[[PreemptionLoss], PreemptionKind]
"""Decides how a request is preempted."""


@dataclass(frozen=True, kw_only=True)
class PreemptionCost:
    """The rule that takes the faster way: recompute tokens that no other request keeps, or copy blocks twice.

        >>> from kv_pool.manager.preemption import PreemptionCost, PreemptionLoss
        >>> rule = PreemptionCost(prefill_tokens_per_s=10_000, copy_bytes_per_s=20e9, block_bytes=2_000_000)
        >>> rule(PreemptionLoss(1000, num_kept_tokens=0, num_cached_tokens=992, num_blocks=63))   # 100, 13 ms
        <PreemptionKind.SWAP: 'swap'>
        >>> rule(PreemptionLoss(1000, num_kept_tokens=960, num_cached_tokens=992, num_blocks=63))   # 4, 13 ms
        <PreemptionKind.RECOMPUTE: 'recompute'>

    Args:
        prefill_tokens_per_s: rate at which the engine computes prompts.
        copy_bytes_per_s: rate at which blocks are copied between device and host, one way.
        block_bytes: bytes of a block in all layers, K and V: `BlockStorage.block_bytes`.
    Raises:
        InvalidArgumentError: one of them is not above 0.

    The request's own cached blocks count as lost: it is preempted because no other block is free, so they
    are reused next.
    """

    prefill_tokens_per_s: float
    copy_bytes_per_s: float
    block_bytes: int

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "copy_bytes_per_s", "block_bytes"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; it must be above 0")

    def __call__(self, loss: PreemptionLoss, /) -> PreemptionKind:
        recompute_s = (loss.num_computed_tokens - loss.num_kept_tokens) / self.prefill_tokens_per_s
        copy_s = 2 * loss.num_blocks * self.block_bytes / self.copy_bytes_per_s
        return PreemptionKind.SWAP if copy_s < recompute_s else PreemptionKind.RECOMPUTE


def find_victim(running: Sequence[R], priority_of: Callable[[R], Any] | None = None) -> R:
    """Return the request to preempt first: of the lowest priority, the last admitted.

    Args:
        running: in the order of admission; a preempted request is admitted again, after all others.
        priority_of: larger is more important; without it all are equal.
    Raises:
        InvalidArgumentError: no request runs.
    """
    if not running:
        raise InvalidArgumentError("no request is running, so none can be preempted")
    if priority_of is None:
        return running[-1]
    return min(reversed(running), key=priority_of)


def count_loss(manager: KVCacheManager, request: SchedulableRequest) -> PreemptionLoss:
    """Return the loss if this request is preempted now. Changes nothing. O(blocks of the request).

    Raises:
        InvalidArgumentError: the request has no blocks.
    """
    num_computed = request.num_computed_tokens
    num_kept = num_cached = num_computed
    num_blocks = 0
    for group_id, spec in enumerate(manager.groups):
        blocks = manager.get_table(request.request_id, GroupId(group_id)).blocks
        num_blocks += sum(not block.is_null for block in blocks)
        if not spec.is_cacheable:
            continue
        # Skip null blocks: tokens that left the window are not needed to continue.
        end_kept = end_cached = len(blocks)
        for position in range(len(blocks) - 1, -1, -1):
            block = blocks[position]
            if not block.is_null and block.block_hash is None:
                end_kept = end_cached = position
            elif not block.is_null and block.ref_cnt == 1:
                end_kept = position
        num_kept = min(num_kept, end_kept * spec.block_size)
        num_cached = min(num_cached, end_cached * spec.block_size)
    num_kept -= num_kept % manager.alignment
    num_cached -= num_cached % manager.alignment
    return PreemptionLoss(num_computed, num_kept, num_cached, num_blocks)
