"""Which running request gives way when no block is free, and how: computed anew later, or swapped out.

    running, first admitted first    a(1)  b(0)  c(1)  d(0)       in brackets the priority, larger for more
    who gives way                     4th   2nd   3rd   1st

The one that gives way last is never preempted, so it ends; then there is another one. This is why every
request that fits into the pool alone ends at last, provided that steps serve requests in this order, too:
those that give way last come first. Nobody should be admitted in a step in which somebody gave way, or it
may take the blocks that were just made free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

from kv_pool.errors import InvalidArgumentError
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import SchedulableRequest

R = TypeVar("R")


class PreemptionKind(Enum):
    """RECOMPUTE: free the blocks, compute the tokens anew. SWAP: copy the blocks to the host, and back."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True)
class PreemptionLoss:
    """What is lost when a request gives way.

    Attributes:
        num_computed_tokens: whose KV is in the blocks.
        num_kept_tokens: of these, from the head, tokens in cached blocks that other requests hold, too. As
            long as they run, nothing has to be computed for these tokens.
        num_cached_tokens: of these, from the head, tokens in cached blocks, whoever holds them. They can be
            hit until somebody takes the blocks, which in a pool without free blocks begins at once, with the
            request's last ones.
        num_blocks: that a swap copies out at most, and in again.
    """

    num_computed_tokens: int
    num_kept_tokens: int
    num_cached_tokens: int
    num_blocks: int


class PreemptionRule(Protocol):
    """How a request gives way; any callable of this form."""

    def __call__(self, loss: PreemptionLoss, /) -> PreemptionKind: ...


@dataclass(frozen=True, kw_only=True)
class PreemptionCost:
    """The rule that takes what is faster: computing what nobody else keeps, or copying all blocks twice.

        >>> from kv_pool.manager.preemption import PreemptionCost, PreemptionLoss
        >>> rule = PreemptionCost(prefill_tokens_per_s=10_000, copy_bytes_per_s=20e9, block_bytes=2_000_000)
        >>> rule(PreemptionLoss(1000, num_kept_tokens=0, num_cached_tokens=992, num_blocks=63))   # 100, 13 ms
        <PreemptionKind.SWAP: 'swap'>
        >>> rule(PreemptionLoss(1000, num_kept_tokens=960, num_cached_tokens=992, num_blocks=63))   # 4, 13 ms
        <PreemptionKind.RECOMPUTE: 'recompute'>

    Args:
        prefill_tokens_per_s: how fast the engine computes prompts.
        copy_bytes_per_s: how fast blocks are copied between device and host, one way.
        block_bytes: bytes of a block in all layers, K and V: `BlockStorage.block_bytes`.
    Raises:
        InvalidArgumentError: one of them is not above 0.

    The request's own cached blocks count as lost: it gives way because no other block is free, so they are
    what is taken next.
    """

    prefill_tokens_per_s: float
    copy_bytes_per_s: float
    block_bytes: int

    def __post_init__(self) -> None:
        for name in ("prefill_tokens_per_s", "copy_bytes_per_s", "block_bytes"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}; it is above 0")

    def __call__(self, loss: PreemptionLoss, /) -> PreemptionKind:
        recompute_s = (loss.num_computed_tokens - loss.num_kept_tokens) / self.prefill_tokens_per_s
        copy_s = 2 * loss.num_blocks * self.block_bytes / self.copy_bytes_per_s
        return PreemptionKind.SWAP if copy_s < recompute_s else PreemptionKind.RECOMPUTE


def find_victim(running: Sequence[R], priority_of: Callable[[R], Any] | None = None) -> R:
    """Who gives way first: the last admitted of the lowest priority.

    Args:
        running: in the order of admission; one that was preempted comes in anew, behind all others.
        priority_of: larger is more important; without it all are equal.
    Raises:
        InvalidArgumentError: nobody runs.
    """
    if not running:
        raise InvalidArgumentError("nobody runs, so nobody can give way")
    if priority_of is None:
        return running[-1]
    return min(reversed(running), key=priority_of)


def count_loss(manager: KVCacheManager, request: SchedulableRequest) -> PreemptionLoss:
    """What is lost when this request gives way now. Changes nothing. O(blocks of the request).

    Raises:
        InvalidArgumentError: the request has no blocks.
    """
    num_computed = request.num_computed_tokens
    num_kept = num_cached = num_computed
    num_blocks = 0
    for group_id, spec in enumerate(manager.groups):
        blocks = manager.get_table(request.request_id, group_id).blocks
        num_blocks += sum(not block.is_null for block in blocks)
        if not spec.is_cacheable:
            continue
        # Null blocks are no obstacle: what left the window is not needed to go on.
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
