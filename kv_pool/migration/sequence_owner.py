"""`SequenceOwner`: an engine whose sequences, or requests, migrate, and what the site asks and tells it."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

Id = TypeVar("Id", contravariant=True)


class SequenceOwner(Protocol[Id]):
    """An engine that knows more of its sequences than their blocks. Called with the pool's lock held.

    source     describe, list_token_ids -> suspend -> give_up   it lives at the target now
                                                   -> resume    it goes on here
    target     expect -> take_over

    Ids are ints over a `GPUKVPool`, and strings over a `KVCacheManager`. The methods here do nothing: a
    subclass has those that it needs.
    """

    def describe(self, sequence_id: Id, /) -> bytes:
        """What an engine of this kind needs to go on with the sequence elsewhere; at most 16 MiB."""
        return b""

    def list_token_ids(self, sequence_id: Id, /) -> Sequence[int]:
        """Tokens of the sequence from its start, as far as they are known; () for none."""
        return ()

    def suspend(self, sequence_id: Id, /) -> object:
        """Do nothing with the sequence until it is resumed, or is gone."""
        return None

    def resume(self, sequence_id: Id, /) -> object:
        """The sequence stays."""
        return None

    def give_up(self, sequence_id: Id, target: str, /) -> object:
        """The node `target` has the sequence; its blocks have just been given back here."""
        return None

    def expect(self, sequence_id: Id, num_blocks: int, state: bytes, /) -> object:
        """A sequence is to come. Raises InvalidArgumentError where it cannot go on here."""
        return None

    def take_over(self, sequence_id: Id, state: bytes, /) -> object:
        """The sequence is here, and holds its blocks.

        What it raises ends the migration as failed: the sequence loses its blocks, which stay cached. The
        source of a move has given it up by then, so let `expect` raise instead.
        """
        return None


class NoOwner(SequenceOwner[Any]):
    """For pools where blocks are all there is to a sequence."""
