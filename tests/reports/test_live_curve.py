"""Reports of live curves, beside the exact curve of the same requests."""

import pytest
from core.policy_pool import make_manager, run

from kv_pool import BlockPool, InvalidArgumentError, KVCacheManager
from kv_pool.core.live_curve import LiveCurve
from kv_pool.replay import ReplaySettings, measure_curves
from kv_pool.reports import read_live_curve

CAPACITY = 2000
MULTIPLES = (0.5, 0.8, 1.0, 1.2, 2.0, 4.0)
NEVER = 10**15


@pytest.fixture(scope="module")
def settings():
    return ReplaySettings("mooncake_conversation", CAPACITY, limit=3000)


@pytest.fixture(scope="module")
def exact(settings):
    points = measure_curves(settings, [round(CAPACITY * multiple) for multiple in MULTIPLES]).points
    return {point.num_blocks: point.lru for point in points}


@pytest.fixture(scope="module")
def curves(settings):
    """Return curves of the same pool by their maximum number of samples."""
    made = {size: LiveCurve(CAPACITY, 512, lambda: 0.0, size, NEVER, 1.0) for size in (1024, 4096, 8000)}
    trace = settings.open_trace()
    for curve in made.values():
        manager = KVCacheManager(BlockPool(CAPACITY + 1, True, 512, live_curve=True))
        manager.block_pool._live_curve = curve
        for request in settings.read_requests(trace, 512):
            prefix = manager.get_computed_blocks(request, request.max_hit_tokens)
            manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
            manager.free(request)
    return made


def test_a_sample_of_all_blocks_gives_the_exact_curve(curves, exact):
    report = read_live_curve(curves[8000], MULTIPLES)
    assert report.sample_rate == 1
    assert [point.num_blocks for point in report.points] == list(exact)
    for point in report.points:
        assert point.block_rate_error == point.token_rate_error == 0
        # A running request's partial block shifts the pool's curve by one block of 2,000.
        assert point.block_hit_rate == pytest.approx(exact[point.num_blocks].block_hit_rate, abs=1e-3)
        assert point.token_hit_rate == pytest.approx(exact[point.num_blocks].token_hit_rate, abs=1e-3)
    assert report.block_hit_rate == pytest.approx(exact[CAPACITY].block_hit_rate)
    assert report.token_hit_rate == pytest.approx(exact[CAPACITY].token_hit_rate, abs=1e-3)
    assert report.estimated_block_hit_rate == pytest.approx(report.block_hit_rate, abs=1e-3)


@pytest.mark.parametrize("size", [1024, 4096])
def test_a_sample_is_within_its_errors_of_the_exact_curve(curves, exact, size):
    """The sample is another one in each process: beyond five standard errors, not three, it is wrong."""
    report = read_live_curve(curves[size], MULTIPLES)
    assert report.sample_rate == size / (4 * CAPACITY)
    for point in report.points:
        off = abs(point.block_hit_rate - exact[point.num_blocks].block_hit_rate)
        assert off <= 5 * point.block_rate_error + 1e-3
        assert point.block_rate_error < 0.03
    off = abs(report.estimated_block_hit_rate - exact[CAPACITY].block_hit_rate)
    assert 0 < off <= 5 * report.estimated_error < 0.15


def test_rates_never_fall_with_the_capacity(curves):
    rates = [point.block_hit_rate for point in read_live_curve(curves[1024]).points]
    assert rates == sorted(rates)


def test_a_new_pool_has_no_points():
    manager = make_manager(100, None, live_curve=True)
    run(manager, "a", range(21))
    report = read_live_curve(manager.block_pool.live_curve)
    assert (report.points, report.get_point(1.2)) == ([], None)
    assert (report.looked_up_blocks, report.block_hit_rate) == (5, 0)
    assert report.half_life_blocks == 3200


def test_a_half_life_is_also_a_time():
    now = [0.0]
    curve = LiveCurve(10, 4, lambda: now[0])
    assert read_live_curve(curve).half_life_seconds is None
    for _ in range(100):
        now[0] += 0.5
        curve.note_touched([BlockPool(2, True, 4).blocks[1]] * 8)
    assert read_live_curve(curve).half_life_seconds == pytest.approx(0.5 * 320 / 8, rel=0.05)


@pytest.mark.parametrize("multiple", [-0.1, 4.1, float("nan")])
def test_a_multiple_out_of_range_is_refused(multiple):
    with pytest.raises(InvalidArgumentError, match="a live curve covers 0 to 4 capacities"):
        read_live_curve(LiveCurve(10, 4, lambda: 0.0), [1, multiple])
