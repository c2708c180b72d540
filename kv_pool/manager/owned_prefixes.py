"""`OwnedPrefixes`: which cached prefixes requests of an adapter, a salt or a session have computed."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.core.salt_regions import read_salt_regions
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHash, BlockHashWithGroupId, GroupId, RequestId
from kv_pool.manager.block_groups.block_table import BlockTable, TableListener


class OwnedPrefix(NamedTuple):
    """The hashes of a request that has ended, one per `hash_block_size` tokens, and its owners."""

    adapter: str | None
    cache_salt: str | None
    regions: Sequence[tuple[int, str]]
    session_id: str | None
    hashes: tuple[BlockHash, ...]


class OwnedPrefixes(TableListener):
    """Remembers requests with an adapter, a salt or a session as long as a block of theirs is cached.

    Args:
        groups: the ids of the groups whose blocks are cached.
        uncached: the running requests whose blocks are not cached any more, by id.
        tables: the manager's mappings of requests with tables: those that run, and those that are detached.

    Memory: the hashes of ended requests, about four per block of the pool and of its lower tiers at most.
    """

    def __init__(
        self,
        pool: BlockPoolCore,
        groups: Collection[GroupId],
        uncached: set[RequestId],
        tables: Sequence[Mapping[RequestId, object]],
    ) -> None:
        self._pool = pool
        self._groups = tuple(groups)
        self._uncached = uncached
        self._tables = tables
        self._num_to_sweep_at = 64
        self._running: dict[RequestId, Any] = {}
        self._ended: list[OwnedPrefix] = []
        self._num_hashes = 0
        self._limit = max(1024, 4 * pool.num_gpu_blocks)

    def note_started(self, request: Any) -> None:
        """Remember a request that gets its first blocks."""
        self.note_ended(request.request_id, ())  # one that left without a notification: see `_sweep`
        if (
            request.lora_request
            or request.cache_salt
            or getattr(request, "salt_regions", None)
            or getattr(request, "session_id", None)
        ):
            if len(self._running) >= self._num_to_sweep_at:
                self._sweep()
            self._running[request.request_id] = request

    def _sweep(self) -> None:
        """Forget requests that have left with an aborted plan, or to another pool; keep their hashes."""
        for request_id in (*self._running, *self._uncached):
            if not any(request_id in tables for tables in self._tables):
                self.note_ended(request_id, ())
        self._num_to_sweep_at = max(64, 2 * len(self._running))

    def note_forked(self, parent_id: RequestId, child: Any) -> None:
        """Remember a request that starts in the blocks of another one."""
        self.note_started(child)
        if parent_id in self._uncached:
            self._uncached.add(child.request_id)

    def note_ended(self, request_id: RequestId, tables: Sequence[BlockTable]) -> None:
        """Keep the hashes of a request that has no blocks any more, if it is remembered."""
        self._uncached.discard(request_id)
        request = self._running.pop(request_id, None)
        if request is None:
            return
        prefix = _read(request)
        self._ended.append(prefix)
        self._num_hashes += len(prefix.hashes)
        if self._num_hashes > self._limit:
            self._ended = [one for one in self._ended if self._is_any_cached(one.hashes)]
            self._num_hashes = sum(len(one.hashes) for one in self._ended)
            self._limit = max(self._limit, 2 * self._num_hashes)

    def find(
        self, adapter: str | None, cache_salt: str | None, session_id: str | None
    ) -> tuple[list[RequestId], list[BlockHashWithGroupId]]:
        """Return the running requests with all the given owners, and the keys of their and ended requests.

        Raises:
            InvalidArgumentError: no owner is given.
        """
        if adapter is None and cache_salt is None and session_id is None:
            raise InvalidArgumentError("name an adapter, a cache_salt or a session_id whose blocks to evict")
        running: list[RequestId] = []
        keys: dict[BlockHashWithGroupId, None] = {}
        prefixes: list[tuple[RequestId | None, OwnedPrefix]] = [(None, one) for one in self._ended]
        prefixes += [(request_id, _read(request)) for request_id, request in self._running.items()]
        for request_id, one in prefixes:
            first = 0
            if adapter is not None and one.adapter != adapter:
                continue
            if session_id is not None and one.session_id != session_id:
                continue
            if cache_salt is not None and one.cache_salt != cache_salt:
                starts = [start for start, salt in one.regions if salt == cache_salt]
                if not starts:
                    continue
                first = min(starts) // self._pool.hash_block_size
            if request_id is not None:
                running.append(request_id)
            keys.update(dict.fromkeys(self._list_keys(one.hashes[first:])))
        return running, list(keys)

    def _list_keys(self, hashes: Iterable[BlockHash]) -> list[BlockHashWithGroupId]:
        return [
            make_block_hash_with_group_id(block_hash, group_id)
            for group_id in self._groups
            for block_hash in hashes
        ]

    def _is_any_cached(self, hashes: Sequence[BlockHash]) -> bool:
        cached = self._pool.cached_block_hash_to_block
        tiers = self._pool.lower_tiers
        is_in_tiers: Any = getattr(tiers, "__contains__", None)
        for key in self._list_keys(hashes):
            if cached.get_one_block(key) is not None or (is_in_tiers is not None and is_in_tiers(key)):
                return True
        return False


def _read(request: Any) -> OwnedPrefix:
    lora = request.lora_request
    return OwnedPrefix(
        lora.lora_name if lora else None,
        request.cache_salt or None,
        tuple(read_salt_regions(request)),
        getattr(request, "session_id", None),
        tuple(request.block_hashes),
    )
