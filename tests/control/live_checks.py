"""Live replays on a test clock, and checks of them, over a `GPUKVPool` and over a `KVCacheManager`."""

from adapter import made_pool
from lab.made_trace import record, write_trace

from kv_pool import GPUKVPool
from kv_pool.contiguous import invariants
from kv_pool.control.serve_settings import ServeSettings
from kv_pool.lab.live.live_replay import STEP_S, LiveReplay
from kv_pool.lab.settings import EngineRates
from kv_pool.migration.pool_site import PoolSite

RATES = EngineRates(prefill_tokens_per_s=1000, decode_tokens_per_s=10)
# The trace repeats one second after its last request.
LAST = record(8, [99], 1, 1_000_000)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def make_live(path, records, clock, *, rates=RATES, publisher=None, **settings):
    """Return a live replay of these records."""
    settings = {"block_size": 8, "trace_block_size": 8, **settings}
    made = ServeSettings(trace=str(write_trace(path, records)), **settings)
    return LiveReplay(made, rates=rates, publisher=publisher, clock=clock)


def run_for(seconds, clock, *replays):
    """Run replays that share a clock, and check their pools after each step."""
    for _ in range(round(seconds / STEP_S)):
        clock.now += STEP_S
        for replay in replays:
            replay.step()
            check(replay.pool)


def check(pool):
    """Check the invariants of either kind of pool."""
    if isinstance(pool, GPUKVPool):
        made_pool.check(pool)
    else:
        invariants.check(pool.block_pool)


def list_held(replay):
    """Return the number of blocks of each request, in order of admission."""
    return {int(one.sequence_id): one.num_blocks for one in replay.pool.describe_sequences().sequences}


def list_ids(replay, number):
    """Return the ids of a request's blocks."""
    if isinstance(replay.pool, GPUKVPool):
        return replay.pool.blocks_of(number)
    return replay.pool.manager.get_block_ids(str(number))


def count_free(replay):
    return replay.pool.get_statistics().free_blocks


def make_site(replay):
    """Return a migration site over the replay's pool."""
    if isinstance(replay.pool, GPUKVPool):
        return made_pool.make_site(replay.pool, owner=replay)
    return PoolSite(replay.pool.get_sequences(), owner=replay)
