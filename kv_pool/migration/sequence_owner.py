"""`SequenceOwner`: the interface between a site and the engine whose sequences or requests migrate."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from kv_pool.ids import NodeName

Id = TypeVar("Id", contravariant=True)


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
        """Continue with the sequence; its move has failed."""
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
        of a move has released the sequence by then, so do all checks in `expect`.
        """
        return None


class NoOwner(SequenceOwner[Any]):
    """The owner for pools whose sequences have no state besides their blocks."""
