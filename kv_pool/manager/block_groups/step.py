"""`Step`: the tokens of one request for which a call requests slots, and a `GroupPlan` for each group."""

from collections.abc import Sequence
from typing import Final

from mypy_extensions import i64, mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import RequestId
from kv_pool.manager.block_groups.block_table import BlockTable

_NONE: Final[list[int]] = []  # never changed


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
        self.shared: list[int] = _NONE
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
        self.caches: bool = True
        self.junction: i64 = 0
        self.prefill_end: i64 = 0
        self.plans: list[GroupPlan] = NO_PLANS
