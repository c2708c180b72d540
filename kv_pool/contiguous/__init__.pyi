# What type checkers see of this package, and what it offers: each name is imported when it is first used.

from kv_pool.contiguous.run_pool import RunBlockPool as RunBlockPool
from kv_pool.contiguous.compaction import Relocation as Relocation
from kv_pool.contiguous.compaction import pack as pack
from kv_pool.contiguous.compaction import gather as gather
from kv_pool.contiguous.compaction import compact as compact
from kv_pool.contiguous.compaction import shrink as shrink
from kv_pool.contiguous.compaction import take_run as take_run
from kv_pool.contiguous.plan import plan_pack as plan_pack
from kv_pool.contiguous.plan import plan_gather as plan_gather
from kv_pool.contiguous.plan import plan_clear_run as plan_clear_run
from kv_pool.contiguous.plan import plan_drain as plan_drain
from kv_pool.contiguous.compaction import apply_moves as apply_moves
from kv_pool.contiguous.defragmenter import Defragmenter as Defragmenter
from kv_pool.contiguous.defragmenter import BackgroundDefragmenter as BackgroundDefragmenter
from kv_pool.contiguous.defragmenter import Defragmentable as Defragmentable
from kv_pool.contiguous.buddy import BuddySystem as BuddySystem
from kv_pool.contiguous.fragmentation import get_fragmentation_rate as get_fragmentation_rate
from kv_pool.contiguous.fragmentation import get_unusable_share as get_unusable_share
