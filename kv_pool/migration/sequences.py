"""The two interfaces of a `PoolSite`: `Sequences`, to a pool, and `SequenceOwner`, to the engine above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import BlockHash, BlockId, NodeName, RequestId, SequenceId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.storage.block_storage import BlockStorage

Id = TypeVar("Id", contravariant=True)


class Sequences(Protocol):
    """The sequences or requests of one pool. Ids are of the pool's own type.

    A site calls the methods that change references or tables while it has set the pool's `is_changing`. A
    method that has a body here is for pools without what it asks for.

    Attributes:
        kind: a description of the sequences. Whole sequences migrate only between pools of the same kind;
            prefixes migrate between all pools.
        details_type: what `describe` returns, as msgspec decodes it at the target.
        lock: the reentrant lock that every user of the pool holds, such as an engine during its step.
        block_sizes: tokens per block of each group.
        frozen: frozen sequences -> reason, for error messages; the pool refuses to use them.
    """

    kind: str
    details_type: Any
    pool: BlockPoolCore
    storage: BlockStorage
    lock: AbstractContextManager[object]
    block_sizes: list[int]
    frozen: dict[Any, str]

    # ---- looking ---------------------------------------------------------------------------------

    def describe_groups(self) -> tuple[str, ...]:
        """Describe the KV cache groups for layout comparison; () if `BlockLayout` is sufficient without."""
        return ()

    def as_id(self, sequence_id: SequenceId | RequestId) -> Any:
        """Convert an id to the pool's own type. Raises InvalidArgumentError, InvalidTypeError."""

    def list_rows(self, sequence_id: Any) -> list[list[KVCacheBlock]]:
        """Return the blocks of a sequence by group, null blocks included.

        Raises:
            UnknownSequenceError: the sequence has no blocks.
            FrozenSequenceError, InvalidArgumentError: its blocks cannot be read now.
        """

    def find_holder(self, block: KVCacheBlock) -> Any | None:
        """Return the sequence to which a moved block is appended at the target; None if there is none."""
        return None

    def find_prefix(self, block_hashes: list[BlockHash]) -> list[list[KVCacheBlock]]:
        """Return the blocks of the longest cached prefix by group, null blocks included."""

    def evict_invalid(self, block_ids: list[BlockId]) -> None:
        """Evict received blocks whose content is invalid, and what was computed from them."""

    def check_movable(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Raise PinnedBlockError if one of these blocks cannot be moved."""
        return None

    def describe(self, sequence_ids: list[Any]) -> Any:
        """Return the state of these sequences that the target's pool needs besides their blocks."""

    # ---- coming ----------------------------------------------------------------------------------

    def check_receives_blocks(self) -> None:
        """Raise InvalidArgumentError if sequences of this pool receive no single blocks."""
        return None

    def check_arriving(
        self, details: Any, sequence_ids: Sequence[Any], num_blocks: int, is_whole: bool
    ) -> None:
        """Check that these sequences can arrive here.

        Args:
            details: the result of the source's `describe`; None if no sequence arrives.
            is_whole: the blocks are one whole sequence, which must not exist here; otherwise existing
                sequences get more blocks.
        Raises:
            InvalidArgumentError: the state does not fit, or this pool cannot receive one of the sequences.
        """

    def count_available(self, details: Any) -> int:
        """Return the number of blocks available to arriving sequences with these details, or None."""

    def take(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take free blocks; at least this many are available."""

    def make_join(
        self, sequence_id: Any, blocks: list[KVCacheBlock], details: Any
    ) -> tuple[Callable[[], object], list[list[KVCacheBlock]]]:
        """Prepare to add blocks to a sequence, which may be new. Changes nothing.

        Returns:
            A function that adds the blocks and passes their references to the sequence; and the rows to pass
            to `free` to undo it.
        Raises:
            InvalidArgumentError: the sequence can no longer receive the blocks.
        """

    # ---- going -----------------------------------------------------------------------------------

    def list_tables(self, sequence_id: Any) -> list[BlockTable]:
        """Return the tables that a move detaches from a sequence; [] if this pool detaches none."""
        return []

    def detach(self, sequence_id: Any, tables: list[BlockTable]) -> None:
        """Detach these tables from a sequence, unless they are detached. The caller owns the references."""
        return None

    def attach(self, sequence_id: Any, tables: list[BlockTable]) -> bool:
        """Attach these tables, unless they are attached. False if the sequence was restarted with others."""
        return True

    def free(self, sequence_id: Any, rows: list[list[KVCacheBlock]]) -> None:
        """Remove blocks from a sequence, detached or not, and drop its references."""

    def forget(self, sequence_id: Any, rows: list[list[KVCacheBlock]]) -> None:
        """Remove blocks from a sequence, without references: a repair counts them again."""


class SequenceOwner(Protocol[Id]):
    """An engine that has state of its sequences besides their blocks. Called with the pool's lock held.

    source     describe, list_token_ids -> suspend -> on_departed   the target has the sequence
                                                   -> resume    it continues here
    target     expect -> on_arrived

    An id is a `SequenceId` for a `GPUKVPool`, a `RequestId` for a `KVCacheManager`. The methods of this
    class do nothing: a subclass overrides those that it needs.
    """

    def describe(self, sequence_id: Id, /) -> bytes:
        """Return the state that the target's engine needs to continue the sequence; at most 16 MiB."""
        return b""

    def list_token_ids(self, sequence_id: Id, /) -> Sequence[int]:
        """Return the known tokens of the sequence from its start; () if none are known."""
        return ()

    def suspend(self, sequence_id: Id, /) -> object:
        """Stop using the sequence until `resume` or `on_departed`."""
        return None

    def resume(self, sequence_id: Id, /) -> object:
        """Continue with the sequence; its move has failed, perhaps during `suspend` or before."""
        return None

    def on_departed(self, sequence_id: Id, target: NodeName, /) -> object:
        """Drop the sequence: node `target` has it, and its blocks have been freed here."""
        return None

    def expect(self, sequence_id: Id, num_blocks: int, state: bytes, /) -> object:
        """Prepare for a sequence. Raise InvalidArgumentError if it cannot continue here."""
        return None

    def on_arrived(self, sequence_id: Id, state: bytes, /) -> object:
        """Take over an arrived sequence, which has its blocks.

        An error raised here fails the migration: the sequence loses its blocks, which stay cached. The source
        of a move has released the sequence by then, so do all checks in `expect`. If the error has
        interrupted the pool, this is called again for a move after the repair.
        """
        return None


class NoOwner(SequenceOwner[Any]):
    """The owner for pools whose sequences have no state besides their blocks."""
