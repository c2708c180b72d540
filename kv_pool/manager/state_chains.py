"""`StateChains`: which cached state continues which, to release those that a conversation has left behind."""

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock


@mypyc_attr(allow_interpreted_subclasses=False)
class ChainedState:
    """A cached state, while its block still holds it.

    Attributes:
        key: the block's cache key when the state was kept; another key means that the block was reused.
        source: the state from which the request that computed this one resumed; None if it started without
            one, or if that state is older than the last two of the conversation.
        is_end: whether it is the last state of a prompt, and not also a junction of shared prefixes.
        num_resumes: number of requests that resumed from it.
    """

    __slots__ = ("block", "is_end", "key", "num_resumes", "source")

    def __init__(self, block: KVCacheBlock, key: bytes, source: "ChainedState | None", is_end: bool) -> None:
        self.block: KVCacheBlock = block
        self.key: bytes = key
        self.source: ChainedState | None = source
        self.is_end: bool = is_end
        self.num_resumes: int = 0

    @property
    def is_cached(self) -> bool:
        """Whether the block still holds the state."""
        return bool(self.block.key == self.key)


@mypyc_attr(allow_interpreted_subclasses=False)
class StateChains:
    """The states that requests resume from and keep, as chains of turns.

        turn 1      turn 2      turn 3 resumes from 2 and keeps its end:
        end 1  <--  end 2  <--  end 3    end 1 is released if only turn 2 resumed from it

    A conversation so keeps the ends of its last two turns: the last for its next turn, the one before for a
    turn that is edited or generated again. Junctions of shared prefixes, middles of prompts, and states that
    several requests resumed from stay until the pool reuses their blocks.

    The records change no block. They survive interrupts: a count that is too high keeps a state.
    """

    def __init__(self) -> None:
        # By block object, not by id: a compaction exchanges ids. One entry per block at most.
        self._states: dict[KVCacheBlock, ChainedState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def note_resumed(self, block: KVCacheBlock) -> ChainedState | None:
        """Record that a request resumes from the state in `block`. Return the state; None if unknown."""
        state = self._states.get(block)
        if state is None or not state.is_cached:
            return None
        state.num_resumes += 1
        return state

    def note_kept(
        self, block: KVCacheBlock, key: bytes, source: ChainedState | None, is_end: bool
    ) -> KVCacheBlock | None:
        """Record a state that a request has cached in `block` under `key`.

        Args:
            source: the state from which the request resumed; None for none.
        Returns:
            The block of the state that this one supersedes: its content may be evicted. None for none.
        """
        self._states[block] = ChainedState(block, key, source, is_end)
        if not is_end or source is None:
            return None
        old = source.source
        source.source = None  # keeps the chain of records at two
        if old is None or not old.is_end or old.num_resumes != 1:
            return None
        if not old.is_cached or self._states.get(old.block) is not old:
            return None
        del self._states[old.block]
        return old.block

    def clear(self) -> None:
        """Forget all states."""
        self._states = {}
