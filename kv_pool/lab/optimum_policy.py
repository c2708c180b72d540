"""`find_optimum`: optimal replacement (Belady's MIN) as a cache policy, for replays."""

from collections.abc import Iterable
from functools import partial
from heapq import heappop, heappush

from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.core.cache_policy import CachedRun, CachePolicy
from kv_pool.core.policy_names import PolicyChoice
from kv_pool.ids import GroupId
from kv_pool.lab.replay_request import ReplayRequest

_NEVER = 1 << 62
_PARKED, _VICTIM = 0, 1


class OptimumPolicy(CachePolicy):
    """Evict the block with the latest next hit, the deepest of a prompt first. Each block is a run.

    `OptimumCurve` says what this is optimal for. Requests must run one at a time, in the order of the trace.
    A block that its next request computes again (`max_hit`) has no next hit. Nor has the spare one of two
    copies of a block.

    Args:
        next_hits: by prefix map key, the number of the next request that can hit the block, after each of its
            uses in turn; `_NEVER` if there is none.
    """

    num_queues = 2

    def __init__(self, next_hits: dict[bytes, list[int]]) -> None:
        super().__init__()
        self._next_hits = {key: iter(hits) for key, hits in next_hits.items()}
        self._by_next_hit: list[tuple[int, int, int, CachedRun]] = []  # a heap; entries may be outdated
        self._num_entries = 0
        self._used: dict[bytes, CachedRun] = {}  # the copy of each block that was used last

    def hit(self, run: CachedRun) -> None:
        self._note_used(run)

    def freed(self, run: CachedRun) -> int:
        self._note_used(run)
        self._push(run, next(self._next_hits[run.key]))
        return _PARKED

    def _note_used(self, run: CachedRun) -> None:
        """Make the other copy of the block, if there is one, a block without a next hit."""
        other = self._used.get(run.key)
        if other is not None and other is not run and other.stamp:
            self._push(other, _NEVER)
        self._used[run.key] = run

    def _push(self, run: CachedRun, next_hit: int) -> None:
        self._num_entries += 1
        run.stamp = self._num_entries
        heappush(self._by_next_hit, (-next_hit, -run.position, run.stamp, run))

    def evicted(self, run: CachedRun, num_blocks: int) -> None:
        run.stamp = 0

    def choose(self) -> int:
        victims = self.queues[_VICTIM]
        while victims.first is None:
            _, _, stamp, run = heappop(self._by_next_hit)
            if run.stamp == stamp and run.is_free:
                victims.append(run)
        return _VICTIM


def find_optimum(requests: Iterable[ReplayRequest], block_size: int, capacity: int) -> PolicyChoice:
    """Return the policy for a replay of these requests in `capacity` blocks, with the instant clock.

    Cost: memory for one number per block of every request.
    """
    uses: dict[bytes, list[int]] = {}  # requests that use the block; negative if they compute it again
    for number, request in enumerate(requests, 1):
        if -(-request.num_tokens // block_size) > capacity:
            continue
        max_hit = request.max_hit_tokens // block_size
        for position, block_hash in enumerate(request.block_hashes):
            key = make_block_hash_with_group_id(block_hash, GroupId(0))
            uses.setdefault(key, []).append(number if position < max_hit else -number)
    next_hits = {
        key: [number if number > 0 else _NEVER for number in numbers[1:]] + [_NEVER]
        for key, numbers in uses.items()
    }
    return PolicyChoice("optimum", partial(OptimumPolicy, next_hits), True)
