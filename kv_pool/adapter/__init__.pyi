# What type checkers see of this package, and what it offers: each name is imported when it is first used.

from kv_pool.adapter.gpu_kv_pool import GPUKVPool as GPUKVPool
from kv_pool.protocol import KVPoolProtocol as KVPoolProtocol
from kv_pool.protocol import BlockAllocationRequest as BlockAllocationRequest
from kv_pool.protocol import AllocationResult as AllocationResult
from kv_pool.protocol import BlockInfo as BlockInfo
from kv_pool.protocol import Eviction as Eviction
from kv_pool.protocol import MigrationResult as MigrationResult
from kv_pool.manager.sequences.ranked_order import EvictionPolicy as EvictionPolicy
from kv_pool.manager.sequences.ranked_order import LRUEviction as LRUEviction
from kv_pool.manager.sequences.ranked_order import SequenceInfo as SequenceInfo
from kv_pool.adapter.device_pools import DevicePools as DevicePools
from kv_pool.migration.migration_hook import MigrationHook as MigrationHook
from kv_pool.adapter.migration_manager import KVPoolMigrationManager as KVPoolMigrationManager
from kv_pool.adapter.migration_manager import RemoteMigration as RemoteMigration
from kv_pool.migration.pool_sequences import PoolSequences as PoolSequences
from kv_pool.errors import PoolExhaustedError as PoolExhaustedError
from kv_pool.errors import UnknownSequenceError as UnknownSequenceError
from kv_pool.errors import EvictedSequenceError as EvictedSequenceError
from kv_pool.errors import FrozenSequenceError as FrozenSequenceError
from kv_pool.errors import PinnedBlockError as PinnedBlockError
from kv_pool.errors import UnknownDeviceError as UnknownDeviceError
