"""`Sequences`: what `PoolSite` asks of the sequences of a pool; two kinds of pools differ in this alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import BlockHash
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.storage.block_storage import BlockStorage


class Sequences(Protocol):
    """The sequences of one pool, or its requests. Ids are of the pool's own type.

    Lists that are passed change in the same step as the references or tables that they stand for. A method
    that an exception interrupted can be called again.

    Attributes:
        block_size: tokens of a block of the first group.
        barred: sequences that a migration has, and why nobody else may use them; the pool refuses them.
    """

    storage: BlockStorage
    block_size: int
    barred: dict[Any, str]

    @property
    def pool(self) -> BlockPoolCore:
        """The pool of the blocks."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held by every user of the pool, such as an engine during its step; reentrant."""

    # ---- looking ---------------------------------------------------------------------------------

    def describe_groups(self) -> tuple[str, ...]:
        """The KV cache groups in words; () where `BlockLayout` says all by itself."""

    def list_block_sizes(self) -> list[int]:
        """Tokens per block of each group."""

    def as_id(self, sequence_id: int | str) -> Any:
        """The id in the pool's own type. Raises InvalidArgumentError, InvalidTypeError."""

    def list_rows(self, sequence_id: Any) -> list[list[KVCacheBlock]]:
        """The blocks of a sequence by group, null blocks included.

        Raises:
            UnknownSequenceError: it has no blocks.
            FrozenSequenceError, InvalidArgumentError: its blocks cannot be read now.
        """

    def find_holder(self, block: KVCacheBlock) -> Any | None:
        """The sequence at whose end the block goes on where it is moved to by its id; None for none."""

    def find_prefix(self, block_hashes: list[BlockHash]) -> list[list[KVCacheBlock]]:
        """The blocks of the longest cached prefix by group, null blocks included."""

    def check_movable(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Raise PinnedBlockError where one of these blocks must stay."""

    def describe(self, sequence_ids: list[Any]) -> bytes:
        """What the other pool needs to know of these sequences besides their blocks."""

    # ---- coming ----------------------------------------------------------------------------------

    def read_details(
        self, details: bytes, sequence_ids: Sequence[Any], num_blocks: int, is_whole: bool
    ) -> Any:
        """What `describe` said at the source; None if it said nothing.

        Args:
            is_whole: these blocks are all of one sequence, which must not be here; otherwise some sequences
                get more blocks.
        Raises:
            InvalidArgumentError: it does not fit, or one of the sequences cannot come here.
        """

    def count_available(self, arriving: Any) -> int:
        """How many blocks sequences of which this was said could have."""

    def touch_onto(self, blocks: list[KVCacheBlock], onto: list[KVCacheBlock]) -> None:
        """Add one reference to each block, and append the blocks to `onto`."""

    def take_onto(self, blocks: list[KVCacheBlock], num_blocks: int) -> None:
        """Append free blocks to `blocks`. Raises OutOfBlocksError with nothing changed."""

    def make_join(
        self, sequence_id: Any, blocks: list[KVCacheBlock], arriving: Any
    ) -> tuple[Callable[[], object], list[list[KVCacheBlock]]]:
        """Prepare to give blocks to a sequence, which need not exist yet; nothing changes.

        Returns:
            A call that does it, after which the references are the sequence's; and the rows by which `free`
            takes them back.
        Raises:
            InvalidArgumentError: it is not possible any more.
        """

    # ---- going -----------------------------------------------------------------------------------

    def detach(self, sequence_id: Any, onto: list[BlockTable]) -> None:
        """Append the tables of a sequence to `onto`, if it is to have none while it is moved."""

    def attach(self, sequence_id: Any, tables: list[BlockTable], rows: list[list[KVCacheBlock]]) -> None:
        """Give detached tables back; or free the rows, where the sequence has begun anew meanwhile."""

    def free(self, sequence_id: Any, rows: list[list[KVCacheBlock]]) -> None:
        """Take blocks from a sequence, detached or not, and drop its references. May be repeated."""

    def recover(self) -> None:
        """Complete calls of the pool that an exception interrupted."""
