"""`ManagerState`: the state of a `KVCacheManager`; the modules that change it import this one."""

from collections.abc import Callable, Sequence
from math import lcm
from typing import Any, SupportsIndex

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import as_count, as_int, as_list_of, check_number, check_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.applied_rules import AppliedRules
from kv_pool.manager.block_copies import BlockCopies
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable, TableListener
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, KVCacheSpec
from kv_pool.manager.owned_prefixes import OwnedPrefixes
from kv_pool.manager.prefix_caching import PrefixCaching
from kv_pool.manager.prefix_rules import PrefixRules
from kv_pool.manager.retention.block_retention import BlockRetention


@mypyc_attr(allow_interpreted_subclasses=True)
class ManagerState:
    """The tables of a manager's requests. A call that changes them sets `is_changing` of the pool meanwhile.

    Args: as for `KVCacheManager`.

    Attributes:
        detached_tables: the tables of requests that are swapped out, or in an open plan or a migration.
        listeners: what follows the life of tables: the retention, the owners of prefixes, the rules; or none.
        discounts_states: whether surplus states may be used instead of blocks to leave free, as by vLLM.
    """

    def __init__(
        self,
        block_pool: BlockPoolCore,
        block_size: SupportsIndex | None = None,
        *,
        groups: Sequence[KVCacheSpec] | None = None,
        max_model_len: SupportsIndex | None = None,
        max_in_flight_tokens: SupportsIndex | None = None,
        watermark: float = 0.0,
        retention: BlockRetention | None = None,
        prefix_rules: PrefixRules | None = None,
        policy: Any = None,
        tracks_owners: bool = False,
    ) -> None:
        check_type("tracks_owners", tracks_owners, bool)
        check_type("block_pool", block_pool, BlockPoolCore)
        check_number("watermark", watermark)
        if groups is None:
            groups = [FullAttentionSpec(block_size=check_block_size(block_pool, block_size))]
        elif block_size is not None:
            raise InvalidArgumentError("block_size is for one group; with groups, each has its own")
        elif not groups:
            raise InvalidArgumentError("groups is empty; a model has at least one group of layers")
        specs: tuple[KVCacheSpec, ...] = tuple(as_list_of("groups", groups, KVCacheSpec))
        self.max_model_len: int = 0  # for no bound
        if max_model_len is not None:
            self.max_model_len = as_count("max_model_len", max_model_len, 1)
        self.max_in_flight_tokens: int = 0
        if max_in_flight_tokens is not None:
            self.max_in_flight_tokens = as_count("max_in_flight_tokens", max_in_flight_tokens, 1)
        if not 0 <= watermark < 1:
            raise InvalidArgumentError(f"watermark is {watermark}; it is a share of the pool, 0 to below 1")
        for spec in specs:
            if spec.is_cacheable and block_pool.enable_caching:
                check_block_size(block_pool, spec.block_size)
        self.block_pool: BlockPoolCore = block_pool
        self.groups: tuple[KVCacheSpec, ...] = specs
        self.block_size: int = specs[0].block_size
        # For each group, the kind of attention and the window that events state.
        self.event_labels: list[tuple[str, int | None]] = [
            (spec.kind, getattr(spec, "sliding_window", None)) for spec in specs
        ]
        self.watermark_blocks: int = int(watermark * block_pool.num_gpu_blocks)
        # Tokens at whose multiples all groups can resume. With a single group, the end of any block.
        self.alignment: int = lcm(*(spec.block_size for spec in specs if spec.is_cacheable))
        self._groups: list[BlockGroup] = [
            spec.make_group(block_pool, GroupId(group_id)) for group_id, spec in enumerate(specs)
        ]
        self._forgets: bool = any(group.forgets for group in self._groups)
        # Entered last, when a request starts, and removed first, when it ends: a repair keeps what is here.
        self._tables: dict[RequestId, list[BlockTable]] = {}
        self.detached_requests: dict[RequestId, str] = {}
        self.detached_tables: dict[RequestId, list[BlockTable]] = {}
        self._hosts: list[Callable[[], ManagerState | None]] = []  # weak references
        self._has_forks: bool = False
        self.discounts_states: bool = False
        self.listeners: list[TableListener] = []
        self.copies: BlockCopies = BlockCopies(block_pool)
        self.prefix_rules: PrefixRules | None = prefix_rules
        self._rules: AppliedRules = AppliedRules(
            prefix_rules, specs, self._groups, block_pool, self.alignment
        )
        self._caching: PrefixCaching = PrefixCaching(block_pool, self._groups, self._rules)
        if self._rules.has_states:
            self.listeners.append(self._caching)
        if self._rules.chains is not None:
            self.listeners.append(self._rules)
        self.retention: BlockRetention | None = None
        self._owners: OwnedPrefixes | None = None
        self._no_blocks: tuple[Sequence[KVCacheBlock], ...] = tuple([()] * len(specs))
        if policy is not None:
            block_pool.open_policy(policy)
        host = block_pool.policy_host
        for group in self._groups:
            if host is not None and group.is_cacheable and not group.is_downward_closed:
                host.unchain(group.group_id)
        if retention is not None:
            self.attach_retention(retention)
        if tracks_owners:
            group_ids = [group.group_id for group in self._groups if group.is_cacheable]
            self._owners = OwnedPrefixes(block_pool, group_ids, self._caching.uncached)
            self.listeners.append(self._owners)

    def get_num_free_blocks(self) -> int:
        """Return the number of free blocks of the pool, including those that a retention keeps."""
        if self.retention is not None and self.retention.holds_blocks:
            self.retention.expire()  # expired pins free their blocks
        return self.block_pool.free_block_queue.num_free_blocks

    def add_host(self, host: Callable[[], "ManagerState | None"]) -> None:
        """Add a weak reference to a manager of copies in host memory: its tables are of swapped-out requests.

        Its pool is reset and repaired with the device's.
        """
        self._hosts = [one for one in self._hosts if one() is not None]
        self._hosts.append(host)

    def list_hosts(self) -> list["ManagerState"]:
        """Return the managers of copies in host memory that are still in use."""
        hosts = [host() for host in self._hosts]
        return [host for host in hosts if host is not None]

    def attach_retention(self, retention: BlockRetention) -> None:
        """Start to keep cached blocks as this retention says; requests may hold blocks already.

        Raises:
            InvalidArgumentError: the manager has another retention, or this one is for another pool. Nothing
                has changed.
        """
        check_type("retention", retention, BlockRetention)
        if self.retention is not None and self.retention is not retention:
            raise InvalidArgumentError("the manager has a retention already; it cannot be replaced")
        if retention.block_pool is not self.block_pool:
            raise InvalidArgumentError("the retention belongs to another pool than the manager's")
        block_sizes = [spec.block_size if spec.is_cacheable else 0 for spec in self.groups]
        retention.attach(block_sizes, self._tables)
        if self.retention is None:
            self.listeners.append(retention)
        self.retention = retention


def check_block_size(block_pool: BlockPoolCore, block_size: SupportsIndex | None) -> int:
    """Return a group's block size: a multiple of the pool's `hash_block_size`, which is the default."""
    if block_size is None:
        return block_pool.hash_block_size
    checked = as_int("block_size", block_size)
    if checked < 1 or checked % block_pool.hash_block_size:
        raise InvalidArgumentError(
            f"block_size {block_size} is not a multiple of the pool's hash_block_size "
            f"{block_pool.hash_block_size}"
        )
    return checked
