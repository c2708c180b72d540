"""`ManagerSequences`: the requests of a `KVCacheManager`, for migration by a `PoolSite`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import msgspec

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.taking import take
from kv_pool.errors import FrozenSequenceError, InvalidArgumentError, UnknownSequenceError
from kv_pool.ids import BlockHash, BlockId, GroupId, RequestId, SequenceId
from kv_pool.manager.allocating import release_blocks
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.migration.sequences import Sequences
from kv_pool.storage.block_storage import BlockStorage


class _TableState(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A block table: for each of its blocks whether it is null; the others are offered in this order."""

    nulls: list[bool]
    num_cached_blocks: int
    num_null_blocks: int
    is_forked: bool


class ManagerSequences(Sequences):
    """The requests of a manager, with the storage of its blocks. See `Sequences`.

    A request migrates with its block tables of all KV cache groups. During a move it is detached from the
    manager. A `BlocksSubject` can only name cached blocks and is only copied, so that no request loses part
    of its blocks.

    Args:
        storage: the bytes of the blocks of all groups.
        lock: a reentrant lock. The engine holds it from `allocate_slots` until the step's bytes are in the
            blocks, and for every call of the manager. None creates one.
    """

    kind = "requests of a KVCacheManager"
    details_type = list[_TableState]

    def __init__(
        self,
        manager: KVCacheManager,
        storage: BlockStorage,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.manager = manager
        self.pool = manager.block_pool
        self.storage = storage
        self.lock = threading.RLock() if lock is None else lock
        self.block_sizes = [spec.block_size for spec in manager.groups]
        self.frozen = manager.detached_requests

    # ---- looking ---------------------------------------------------------------------------------

    def describe_groups(self) -> tuple[str, ...]:
        pool = self.pool
        first = self.manager.groups[0]
        is_plain = len(self.manager.groups) == 1 and isinstance(first, FullAttentionSpec)
        if is_plain and first.block_size == pool.hash_block_size and not pool.num_hash_lookahead_tokens:
            return ()
        hashed = f"hashes of {pool.hash_block_size} tokens and {pool.num_hash_lookahead_tokens} ahead"
        return (*map(repr, self.manager.groups), hashed)

    def as_id(self, sequence_id: SequenceId | RequestId) -> RequestId:
        return RequestId(str(sequence_id))

    def list_rows(self, sequence_id: RequestId) -> list[list[KVCacheBlock]]:
        if not self.manager.holds_blocks(sequence_id):
            why = self.frozen.get(sequence_id)
            if why is not None:
                raise FrozenSequenceError(f"request {sequence_id!r} is detached: {why}")
            raise UnknownSequenceError(f"request {sequence_id!r} has no blocks here")
        rows = [table.blocks for table in self.list_tables(sequence_id)]
        for row in rows:
            self.manager.copies.check_made(sequence_id, row)
        return rows

    def find_prefix(self, block_hashes: list[BlockHash]) -> list[list[KVCacheBlock]]:
        num_tokens = len(block_hashes) * self.pool.hash_block_size
        # A request as far as a lookup reads it: a prompt without inputs of an encoder.
        wanted: Any = SimpleNamespace(
            request_id="",
            num_tokens=num_tokens,
            num_prompt_tokens=num_tokens,
            block_hashes=block_hashes,
            mm_features=(),
            lora_request=None,
            cache_salt=None,
        )
        return [list(row) for row in self.manager.get_computed_blocks(wanted, num_tokens).blocks]

    def evict_invalid(self, block_ids: list[BlockId]) -> None:
        self.manager.evict_blocks(block_ids)

    def describe(self, sequence_ids: list[RequestId]) -> list[_TableState]:
        return [
            _TableState(
                [block.is_null for block in table.blocks],
                table.num_cached_blocks,
                table.num_null_blocks,
                table.is_forked,
            )
            for sequence_id in sequence_ids
            for table in self.list_tables(sequence_id)
        ]

    # ---- coming ----------------------------------------------------------------------------------

    def check_receives_blocks(self) -> None:
        raise InvalidArgumentError(
            "a manager receives whole requests, and the offer has single blocks; move the request instead"
        )

    def check_arriving(
        self,
        details: list[_TableState] | None,
        sequence_ids: Sequence[RequestId],
        num_blocks: int,
        is_whole: bool,
    ) -> None:
        if not sequence_ids:
            return
        if not is_whole:
            self.check_receives_blocks()
        self._check_absent(sequence_ids[0])
        tables = details or []
        # One table for each group; each offered block is in exactly one of them.
        num_listed = sum(not is_null for table in tables for is_null in table.nulls)
        if len(tables) != len(self.manager.groups) or num_listed != num_blocks:
            raise InvalidArgumentError(
                f"the source's request has {len(tables)} tables with {num_listed} blocks; this manager has "
                f"{len(self.manager.groups)} groups, and {num_blocks} blocks were offered"
            )

    def count_available(self, details: list[_TableState] | None) -> int:
        is_request = details is not None and bool(self.manager.list_request_ids())
        return self.manager.get_num_free_blocks() - (self.manager.watermark_blocks if is_request else 0)

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        return take(self.pool, num_blocks)

    def make_join(
        self, sequence_id: RequestId, blocks: list[KVCacheBlock], details: list[_TableState]
    ) -> tuple[Callable[[], object], list[list[KVCacheBlock]]]:
        self._check_absent(sequence_id)
        tables = []
        arriving = iter(blocks)
        for state in details:
            table = BlockTable()
            table.blocks = [self.pool.null_block if is_null else next(arriving) for is_null in state.nulls]
            table.num_cached_blocks = state.num_cached_blocks
            table.num_null_blocks = state.num_null_blocks
            table.is_forked = state.is_forked
            tables.append(table)

        def join() -> None:
            if tables:
                self.manager.put_tables(sequence_id, tables)

        return join, [table.blocks for table in tables]

    # ---- going -----------------------------------------------------------------------------------

    def list_tables(self, sequence_id: RequestId) -> list[BlockTable]:
        num_groups = len(self.manager.groups)
        return [self.manager.get_table(sequence_id, GroupId(group_id)) for group_id in range(num_groups)]

    def detach(self, sequence_id: RequestId, tables: list[BlockTable]) -> None:
        if self._has_row(sequence_id, tables[0].blocks):
            self.manager.pop_tables(sequence_id)
        else:
            self.manager.detached_tables[sequence_id] = tables

    def attach(self, sequence_id: RequestId, tables: list[BlockTable]) -> bool:
        if not self.manager.holds_blocks(sequence_id):
            self.manager.put_tables(sequence_id, tables)
        return self._has_row(sequence_id, tables[0].blocks)

    def free(self, sequence_id: RequestId, rows: list[list[KVCacheBlock]]) -> None:
        manager = self.manager
        is_attached = self._has_row(sequence_id, rows[0])
        tables = self.list_tables(sequence_id) if is_attached else manager.detached_tables.get(sequence_id)
        self.forget(sequence_id, rows)
        for group_id, row in enumerate(rows):
            release_blocks(manager, sequence_id, GroupId(group_id), 0, row.copy())
        if tables is not None and not manager.holds_blocks(sequence_id):
            for listener in manager.listeners:
                listener.note_ended(sequence_id, tables)

    def forget(self, sequence_id: RequestId, rows: list[list[KVCacheBlock]]) -> None:
        if self._has_row(sequence_id, rows[0]):
            self.manager.pop_tables(sequence_id)
        self.manager.forget_tables(sequence_id)

    # ---- inside ----------------------------------------------------------------------------------

    def _has_row(self, request_id: RequestId, row: list[KVCacheBlock]) -> bool:
        """Whether this list is the request's first table, which is neither detached nor restarted."""
        return self.manager.holds_blocks(request_id) and self.manager.get_table(request_id).blocks is row

    def _check_absent(self, request_id: RequestId) -> None:
        if self.manager.holds_blocks(request_id):
            raise InvalidArgumentError(f"request {request_id!r} already has blocks at this node")
