"""`BlockTable`: the blocks of a request in one group; `TableListener`: hears of blocks that leave a table.

`Step`: the tokens of one request for which a call requests slots, and a `GroupPlan` for each group.
"""

from collections.abc import Sequence
from typing import Any, Final

from mypy_extensions import i64, mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import BlockId, GroupId, RequestId
from kv_pool.manager.block_groups.state_chains import ChainedState
from kv_pool.manager.requests.request import SchedulableRequest

_NO_POSITIONS: Final[list[int]] = []  # never changed

ALL_TOKENS: Final = 2**62
"""`BlockTable.num_valid_tokens` of a request without suspect content."""


@mypyc_attr(allow_interpreted_subclasses=False)
class BlockTable:
    """The blocks of one request in one group: block i holds tokens `[i * block_size, (i + 1) * block_size)`.

    Full blocks are immutable; the last one is written. An entry keeps its block until the request is freed,
    with three exceptions, which `num_edits` counts: a block that left the window becomes the null block, a
    shared block is replaced before it is written, and a swapped request comes back in other blocks. (A
    compaction exchanges the ids of block objects: the table stays as it is, and the pool's epoch advances.)

    Attributes:
        blocks: head first.
        num_cached_blocks: leading blocks that are registered in the prefix map.
        num_null_blocks: leading blocks that left the window and are now the null block.
        num_edits: how often existing entries were changed.
        is_forked: the last blocks may be shared with another request that will write them.
        request: the request as it was passed when the tables changed last; None if it is not known yet.
        num_hits: leading entries whose content may come from elsewhere: a hit, a lower tier, another pool.
            The request itself has written the later ones.
        past: entries that left the table: those before a window, and originals of copies. For each change,
            the first position, the blocks, and their generations. None for none.
        num_valid_tokens: tokens before the first one that was reported as invalid and is not recomputed yet.

    Attributes about states, and hits that end within a block:
        copy_position: entry whose cached content the next step overwrites, so that it is copied first; -1.
            Set by such a hit, and by caching the end of a prompt within its block; cleared by the copy.
        tail_tokens: tokens of the state within a block that the request has cached and not overwritten; or 0.
        num_speculative: entries at the end that hold the states after draft tokens; see `MambaSpec`.
        checkpoint_position, checkpoint_tokens: entry of the state that the current step saves on its way,
            and the number of tokens that it covers; -1 and 0 without one.
        unaligned_position: entry whose state was left within its block, so that it is not the state at the
            block's end; -1. With `PrefixRules` only.
        junction: tokens of the longest cached prefix of a single group, if the hit was shorter; else 0.
        resumed: the cached state from which the request resumed, with `PrefixRules.bounded_states`.
    """

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.num_cached_blocks: int = 0
        self.num_null_blocks: int = 0
        self.num_edits: int = 0
        self.is_forked: bool = False
        self.request: Any = None
        self.num_hits: int = ALL_TOKENS
        self.past: list[tuple[int, list[KVCacheBlock], list[int]]] | None = None
        self.num_valid_tokens: int = ALL_TOKENS
        self.copy_position: int = -1
        self.tail_tokens: int = 0
        self.num_speculative: int = 0
        self.checkpoint_position: int = -1
        self.checkpoint_tokens: int = 0
        self.unaligned_position: int = -1
        self.junction: int = 0
        self.resumed: ChainedState | None = None

    def __repr__(self) -> str:
        ids = " ".join([str(block.block_id) for block in self.blocks[:8]])
        more = " ..." if len(self.blocks) > 8 else ""
        return f"<BlockTable of {len(self.blocks)} blocks: {ids}{more}>"

    def add_past(self, first: int, blocks: list[KVCacheBlock]) -> None:
        """Record that these blocks leave the table, the first of them at this position."""
        if self.past is None:
            self.past = []
        self.past.append((first, blocks, [block.generation for block in blocks]))

    def list_past(self, position: int) -> list[KVCacheBlock]:
        """Return the blocks that left this position and still have their content."""
        found: list[KVCacheBlock] = []
        for first, blocks, generations in self.past or ():
            place = position - first
            if 0 <= place < len(blocks) and blocks[place].generation == generations[place]:
                found.append(blocks[place])
        return found

    def list_ids(self) -> list[BlockId]:
        """Return the block ids, head first; the null block's id for an entry without a block."""
        return [block.block_id for block in self.blocks]


@mypyc_attr(allow_interpreted_subclasses=True)
class TableListener:
    """A part of a manager that follows the life of tables, such as a retention: see `ManagerState.listeners`.

    The methods are called during a call that changes the pool. Without an override they do nothing.
    """

    def note_started(self, request: SchedulableRequest) -> None:
        """A request has just got the blocks of its prefix, and gets its first own blocks next."""

    def note_leaving(
        self, request_id: RequestId, group_id: GroupId, first: int, blocks: list[KVCacheBlock]
    ) -> None:
        """A request is about to release blocks of its table.

        Args:
            first: the table index of the first block.
            blocks: head first; null blocks may be among them.
        """

    def note_ended(self, request_id: RequestId, tables: Sequence[BlockTable]) -> None:
        """A request ends: it has released the blocks that these tables list, or its caller is about to."""


@mypyc_attr(acyclic=True, free_list_len=1)
class GroupPlan:
    """The blocks that a step takes in one group: planned once, to see whether they fit, and then taken.

    Attributes:
        need: free blocks that must be there: hits on free blocks, and the blocks to take. For states, a few
            more where vLLM counts more than it takes.
        num_nulls: entries of a new table that are null, because they lie before the window.
        shared: entries that the step writes and others hold, too: each is replaced.
        num_external: blocks for external tokens.
        num_new: blocks to append after these.
        null_end: for states, the entries before this one that are not read become null.
        checkpoint: tokens of the state that the step saves on its way; 0 for none.
    """

    def __init__(self) -> None:
        self.need: int = 0
        self.num_nulls: int = 0
        self.shared: list[int] = _NO_POSITIONS
        self.num_external: int = 0
        self.num_new: int = 0
        self.null_end: int = 0
        self.checkpoint: int = 0


NO_PLANS: Final[list[GroupPlan]] = []


# Every call creates one. Compiled, it has no cyclic-GC header and reuses the memory of the previous one.
@mypyc_attr(acyclic=True, free_list_len=1)
class Step:
    """The request of one `allocate_slots` call; all counts are tokens from the head of the sequence.

        |<- computed ->|<- prefix ->|<- external ->|<- new ->|<- lookahead ->|
          num_computed
        |<------------- num_before --------------->|
        |<------------------ num_scheduled ----------------->|

    Args:
        max_model_len: most tokens of a request, which cuts new and lookahead tokens; 0 for no bound.

    Attributes:
        tables: one per group; None for a request without blocks.
        prefix_blocks: for a request without blocks, its hits in each group.
        num_prefix, num_external: tokens of the prefix, and of the external ones, alone.
        num_lookahead: slots after `num_scheduled`, for speculative tokens.
        num_encoder_tokens: slots for cross-attention.
        num_final: tokens that are computed for good; blocks before their window are released.
        num_sequence: tokens of the whole request, if all of them must fit now; else 0.
        num_left: blocks to leave free for running requests.
        num_reserved: further blocks to leave free, except by the whole sequence.
        is_alone: plan as if no other request held blocks: none is shared, and all hits are free.
        caches: whether the full blocks of known tokens are cached at once.
        junction: see `CachedPrefix`; for a request without blocks.
        prefill_end: tokens at which a state may be saved in the middle of the step: see
            `MambaGroup.plan_checkpoint`.
        plans: one per group, once `plan_step` has made them.
    """

    def __init__(
        self,
        request_id: RequestId,
        tables: list[BlockTable] | None,
        num_computed: i64,
        num_prefix: i64,
        num_external: i64,
        num_new: i64,
        num_lookahead: i64,
        max_model_len: i64,
    ) -> None:
        num_before = num_computed + num_prefix + num_external
        num_scheduled = num_before + num_new
        if max_model_len and num_scheduled + num_lookahead > max_model_len:
            num_scheduled = min(num_scheduled, max_model_len)
            num_lookahead = max_model_len - num_scheduled
        self.request_id: RequestId = request_id
        self.tables: list[BlockTable] | None = tables
        self.prefix_blocks: tuple[Sequence[KVCacheBlock], ...] = ()
        self.num_computed: i64 = num_computed
        self.num_prefix: i64 = num_prefix
        self.num_before: i64 = num_before
        self.num_external: i64 = num_external
        self.num_scheduled: i64 = num_scheduled
        self.num_lookahead: i64 = num_lookahead
        self.num_encoder_tokens: i64 = 0
        self.num_final: i64 = num_before
        self.num_sequence: i64 = 0
        self.num_left: i64 = 0
        self.num_reserved: i64 = 0
        self.is_alone: bool = False
        self.caches: bool = True
        self.junction: i64 = 0
        self.prefill_end: i64 = 0
        self.plans: list[GroupPlan] = NO_PLANS
