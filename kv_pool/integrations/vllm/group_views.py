"""`GroupsView` and `GroupView`: the groups of an `EngineManager`, as connectors of an engine read them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import BlockHash, GroupId, RequestId
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.engine.engine_manager import EngineManager

T = TypeVar("T")


class ByRequest(Mapping[RequestId, T]):
    """A value of each running request, read from its block table in one group.

    Args:
        read: what to return for a table; None if it has no such value.
        make_missing: makes the value of a request without one; None to raise KeyError.
    """

    def __init__(
        self,
        engine: EngineManager,
        group_id: GroupId,
        read: Callable[[BlockTable], T | None],
        make_missing: Callable[[], T] | None = None,
    ) -> None:
        self._engine = engine
        self._group_id = group_id
        self._read = read
        self._make_missing = make_missing

    def __getitem__(self, request_id: RequestId) -> T:
        value: T | None = self.get(request_id)
        if value is not None:
            return value
        if self._make_missing is None:
            raise KeyError(request_id)
        return self._make_missing()

    def get(self, request_id: RequestId, default: Any = None) -> Any:
        tables = self._engine.find_tables(request_id)
        value = None if tables is None else self._read(tables[self._group_id])
        return default if value is None else value

    def __contains__(self, request_id: object) -> bool:
        return isinstance(request_id, str) and self.get(RequestId(request_id)) is not None

    def __iter__(self) -> Iterator[RequestId]:
        return (request_id for request_id in self._engine.manager.list_request_ids() if request_id in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def read_checkpoint(table: BlockTable) -> tuple[int, int] | None:
    """Return the state that a step saves on its way: its tokens and its entry of the table; None for none."""
    return None if table.checkpoint_position < 0 else (table.checkpoint_tokens, table.checkpoint_position)


class GroupView:
    """One group of an engine's manager, read-only.

    Attributes:
        kv_cache_spec: the engine's own specification of the group.
        req_to_blocks: request id -> live block table; an empty list for a request without blocks.
        num_cached_block: request id -> number of leading cached blocks.

    Contract: what vLLM 0.33 reads of a `SingleTypeKVCacheManager` outside its manager.
    """

    def __init__(self, engine: EngineManager, group_id: GroupId, kv_cache_spec: Any) -> None:
        group = engine.groups[group_id]
        self.block_size: int = group.block_size
        self.kv_cache_group_id = group_id
        self.kv_cache_spec = kv_cache_spec
        self.cache_hit_alignment_tokens: int = engine.caching.hit_alignment
        self.block_pool: BlockPoolCore = engine.block_pool
        self.enable_caching: bool = engine.enable_caching
        self.req_to_blocks: Mapping[RequestId, list[KVCacheBlock]] = ByRequest(
            engine, group_id, lambda table: table.blocks, list
        )
        self.num_cached_block: Mapping[RequestId, int] = ByRequest(
            engine, group_id, lambda table: table.num_cached_blocks
        )
        self.records_new_block_ids: bool = group_id in engine.zeroed_groups
        self._group = group
        # vLLM's names; its tests of the scheduler and of states read them.
        self._null_block = engine.block_pool.null_block
        self._checkpoints: Mapping[RequestId, tuple[int, int]] = ByRequest(engine, group_id, read_checkpoint)

    @property
    def has_positionally_stable_blocks(self) -> bool:
        """Whether a table entry keeps its range of tokens."""
        return not self._group.reads_before_writes


class GroupsView:
    """The groups of an engine's manager, and calls that concern all of them.

    Attributes:
        single_type_managers: one `GroupView` per group.
        scheduler_block_size: tokens; a chunk of a prefill that ends at a multiple can be continued by a hit.
        get_num_blocks_to_allocate: `EngineManager.count_needed_blocks`.
        full_attention_group_id: the first group that keeps all tokens; None if there is none.

    Contract: what vLLM 0.33 reads of a `KVCacheCoordinator` outside its manager.
    """

    def __init__(
        self,
        engine: EngineManager,
        view_classes: Sequence[type[GroupView]],
        specs: Sequence[Any],
        *,
        scheduler_block_size: int,
    ) -> None:
        self._engine = engine
        self.block_pool: BlockPoolCore = engine.block_pool
        self.hash_block_size: int = engine.block_pool.hash_block_size
        self.scheduler_block_size = scheduler_block_size
        self._cache_hit_alignment_tokens: int = engine.caching.hit_alignment  # vLLM's name; its tests read it
        self.enable_partial_hash_hits: bool = engine.caching.is_partial
        full = engine.caching.lookup.full
        self.full_attention_group_id: GroupId | None = None if full is None else full.group_ids[0]
        self.single_type_managers = tuple(
            [
                view_class(engine, GroupId(group_id), spec)
                for group_id, (view_class, spec) in enumerate(zip(view_classes, specs, strict=True))
            ]
        )
        self.get_num_blocks_to_allocate = engine.count_needed_blocks
        self.group_block_sizes = tuple([view.block_size for view in self.single_type_managers])

    @property
    def retention_interval(self) -> int | None:
        """The retention interval of `PrefixRules`; a new one is for blocks that are cached from then on."""
        return self._engine.caching.interval

    @retention_interval.setter
    def retention_interval(self, interval: int | None) -> None:
        self._engine.caching.set_interval(interval)

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int, int]:
        """Return the blocks by group, the tokens of the common prefix, and those of the junction after it."""
        if not self._engine.enable_caching:
            return tuple([[] for _ in self.single_type_managers]), 0, 0
        blocks, num_tokens, junction = self._engine.caching.lookup.find(block_hashes, max_cache_hit_length)
        return tuple(blocks), num_tokens, max(0, junction - num_tokens)

    def find_longest_cache_hit_per_group(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], tuple[int, ...]]:
        """Return the blocks and the tokens of each group's own longest prefix."""
        found, lengths = self._engine.caching.lookup.find_by_group(block_hashes, max_cache_hit_length)
        return tuple(found), tuple(lengths)

    def get_blocks(self, request_id: RequestId) -> tuple[list[KVCacheBlock], ...]:
        """Return the live block tables of the request; empty lists for an unknown one."""
        return tuple([view.req_to_blocks[request_id] for view in self.single_type_managers])
