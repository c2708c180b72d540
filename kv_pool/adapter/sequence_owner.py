"""`SequenceOwner`: an engine whose sequences migrate, and what it is asked and told."""

from collections.abc import Sequence
from typing import Protocol


class SequenceOwner(Protocol):
    """An engine that knows more of its sequences than their blocks. Called with the pool's lock held.

    source     describe, list_token_ids -> suspend -> give_up   it lives at the target now
                                                   -> resume    it goes on here
    target     expect -> take_over
    """

    def describe(self, sequence_id: int) -> bytes:
        """What an engine of this kind needs to go on with the sequence elsewhere. Only looks."""

    def list_token_ids(self, sequence_id: int) -> Sequence[int]:
        """Tokens of the sequence from its start, as far as they are known; () for none."""

    def suspend(self, sequence_id: int) -> object:
        """Do nothing with the sequence until it is resumed, or is gone."""

    def resume(self, sequence_id: int) -> object:
        """The sequence stays."""

    def give_up(self, sequence_id: int, target: str) -> object:
        """The node `target` has the sequence; its blocks have just been given back here."""

    def expect(self, sequence_id: int, num_blocks: int, state: bytes) -> object:
        """A sequence is to come. Raises InvalidArgumentError where it can not go on here."""

    def take_over(self, sequence_id: int, state: bytes) -> object:
        """The sequence is here, and holds its blocks. Does not fail: `expect` has looked."""
