"""Replays on the trace clock, over groups, lower tiers and a host pool, with checks that no block leaks.

Expected times of the tests are computed by hand: blocks of 8 tokens, 1 ms to compute a prompt token, 10 ms to
generate a token, 1 ms to copy a block between device and host, 4 ms between host and disk.
"""

from lab.made_trace import make_random_records

from kv_pool import BlockPool, KVCacheManager
from kv_pool.core import invariants
from kv_pool.lab.driver import ReplayDriver
from kv_pool.lab.groups import PromptSteps, parse_groups
from kv_pool.lab.replay_request import ReplayRequest
from kv_pool.lab.settings import EngineRates, ReplaySettings
from kv_pool.lab.trace import TraceRequest
from kv_pool.lab.trace_clock import TraceClock
from kv_pool.tiers.invariants import check as check_tiers

BLOCK_SIZE = 8
BLOCK_BYTES = 1000
COPY_RATE = 1e6
MAX_CALLS = 50_000


class ImpatientDriver(ReplayDriver):
    """A driver that fails the test if simulated time stops and the replay would never end.

    Counts how often a load was aborted by a preemption.
    """

    num_calls = 0
    num_aborted = 0

    def allocate(self, request, num_new_tokens, prefix=None):
        self.num_calls += 1
        assert self.num_calls < MAX_CALLS, f"request {request.request_id} is allocated without end"
        return super().allocate(request, num_new_tokens, prefix)

    def preempt(self, request, now_ms):
        self.num_aborted += self.is_reading(request)
        return super().preempt(request, now_ms)


def run_timed(
    requests,
    num_blocks,
    convention="full_blocks_cap",
    *,
    groups="full",
    chunk_tokens=None,
    watermark=0.0,
    tiers=(0, 0),
    write="back",
    num_host_blocks=0,
    preemption="swap",
    block_bytes=BLOCK_BYTES,
    **rates,
):
    """Replay requests (arrival_ms, input_length, output_length, hash_ids). Return report and aborted loads.

    Args:
        tiers: capacities in host memory and on disk.
        num_host_blocks: of the host pool to which preempted requests are swapped.
    """
    specs = parse_groups(groups, BLOCK_SIZE)
    pool = BlockPool(num_blocks + 1, True, BLOCK_SIZE)
    most = chunk_tokens and max(chunk_tokens, BLOCK_SIZE)
    manager = KVCacheManager(pool, groups=specs, max_in_flight_tokens=most, watermark=watermark)
    rates = {"prefill_tokens_per_s": 1000.0, "decode_tokens_per_s": 100.0, **rates}
    settings = ReplaySettings(
        "",
        num_blocks,
        convention=convention,
        clock="trace",
        rates=EngineRates(copy_bytes_per_s=COPY_RATE, disk_bytes_per_s=COPY_RATE / 4, **rates),
        host_blocks=num_host_blocks,
        host_tier=tiers[0],
        disk_tier=tiers[1],
        tier_write=write,
        block_bytes=block_bytes,
        preemption=preemption,
    )
    driver = ImpatientDriver(manager, settings)
    report, swap = driver.report, driver.swap
    arriving = (
        ReplayRequest.from_trace(TraceRequest(line, *request, None), BLOCK_SIZE, convention, BLOCK_SIZE)
        for line, request in enumerate(requests, 1)
    )
    clock = TraceClock(driver, PromptSteps.for_groups(specs, chunk_tokens))
    clock.run(arriving, lambda: None)
    assert pool.get_num_free_blocks() == num_blocks
    invariants.check(pool)
    if driver.tiers is not None:
        check_tiers(driver.tiers.onboarder)
    if swap is not None:
        assert swap.swapper.host_pool.get_num_free_blocks() == num_host_blocks
        assert swap.swapper.list_swapped_out() == []
        invariants.check(swap.swapper.host_pool)
        assert report.swapped_in == report.swapped_out <= report.preempted
        assert report.bytes_moved == block_bytes * (report.blocks_swapped_out + report.blocks_swapped_in)
    return report, driver.num_aborted


def draw_requests(rng, partial_ids=True):
    """Return random requests; some arrive late."""
    return [
        (
            traced["timestamp"] if rng.random() < 0.95 else 0,
            traced["input_length"],
            traced["output_length"],
            traced["hash_ids"],
        )
        for traced in make_random_records(rng, 80, BLOCK_SIZE, partial_ids=partial_ids)
    ]
