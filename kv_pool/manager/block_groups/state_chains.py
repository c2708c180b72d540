"""`StateChains`: the turns of conversations: which cached state continues which, and where requests ended."""

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import RequestId


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

    The last cached block of a request that has ended is recorded, too: if a request shares its prefix up to
    there with earlier ones, it is the next turn, and the prefix's end is no junction.

    The records change no block. They survive interrupts: a count that is too high keeps a state.

    Attributes:
        superseded: states to release; the caller removes them from the list.
    """

    def __init__(self) -> None:
        # By block object, not by id: a compaction exchanges ids. One entry per block at most.
        self._states: dict[KVCacheBlock, ChainedState] = {}
        self._ends: dict[KVCacheBlock, tuple[bytes, RequestId | None]] = {}
        self.superseded: list[ChainedState] = []

    def __len__(self) -> int:
        return len(self._states)

    def note_ended(self, block: KVCacheBlock) -> None:
        """Record the last cached block of a request that has ended."""
        if block.key is not None:
            self._ends[block] = (block.key, None)

    def is_next_turn(self, block: KVCacheBlock, request_id: RequestId) -> bool:
        """Return True if a request ended with this block and no other request has continued it.

        Records that this request continues it.
        """
        end = self._ends.get(block)
        if end is None or end[0] != block.key:
            return False
        if end[1] is None:
            self._ends[block] = (end[0], request_id)
            return True
        return end[1] == request_id

    def note_resumed(self, block: KVCacheBlock) -> ChainedState | None:
        """Record that a request resumes from the state in `block`. Return the state; None if unknown."""
        state = self._states.get(block)
        if state is None or not state.is_cached:
            return None
        state.num_resumes += 1
        return state

    def note_kept(self, block: KVCacheBlock, source: ChainedState | None, is_end: bool) -> None:
        """Record the state that a request has cached in `block`. Nothing happens if the block has no key.

        Args:
            source: the state from which the request resumed; None for none.
            is_end: see `ChainedState`.
        """
        if block.key is None:
            return
        self._states[block] = ChainedState(block, block.key, source, is_end)
        if not is_end or source is None:
            return
        old = source.source
        source.source = None  # keeps the chain of records at two
        if old is not None and old.is_end and old.num_resumes == 1 and self._states.get(old.block) is old:
            self.superseded.append(old)
