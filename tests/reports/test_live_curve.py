"""Reports of live curves, beside the exact curve of the same requests."""

import math

import pytest
from core.policy_pool import make_manager, run

from kv_pool import BlockPool, InvalidArgumentError, KVCacheManager
from kv_pool.core.live_curve import LiveCurve
from kv_pool.lab import ReplaySettings, measure_curves
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


def draw_curve(settings, size, salt=0):
    """Return the curve of a pool after the trace, of a sample of at most this size."""
    curve = LiveCurve(CAPACITY, 512, lambda: 0.0, size, NEVER, 1.0, salt)
    manager = KVCacheManager(BlockPool(CAPACITY + 1, True, 512, live_curve=True))
    manager.block_pool.parts[:] = [curve]
    for request in settings.open_trace().read_requests():
        prefix = manager.get_computed_blocks(request, request.max_hit_tokens)
        manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
        manager.free(request)
    return curve


@pytest.fixture(scope="module")
def curves(settings):
    """Return curves of the same pool by their maximum number of samples."""
    return {size: draw_curve(settings, size) for size in (1024, 8000)}


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
def test_samples_are_within_their_errors_of_the_exact_curve(settings, exact, size):
    """Eight samples, because each process has other blocks in a sample."""
    reports = [read_live_curve(draw_curve(settings, size, salt), MULTIPLES) for salt in range(8)]
    assert len({report.estimated_block_hit_rate for report in reports}) > 4, "salts choose samples"
    assert {report.sample_rate for report in reports} == {size / (4 * CAPACITY)}
    for points in zip(*[report.points for report in reports], strict=True):
        rate = exact[points[0].num_blocks].block_hit_rate
        off = root_mean_square([point.block_hit_rate - rate for point in points])
        error = root_mean_square([point.block_rate_error for point in points])
        assert off <= 4 * error + 1e-3  # 3 failed once in some hundred runs
        assert error < 0.03
    rate = exact[CAPACITY].block_hit_rate
    off = root_mean_square([report.estimated_block_hit_rate - rate for report in reports])
    assert 0 < off <= 3 * root_mean_square([report.estimated_error for report in reports]) < 0.1


def root_mean_square(numbers):
    return math.sqrt(math.fsum(number * number for number in numbers) / len(numbers))


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
        curve.note_touched([BlockPool(2, True, 4).blocks[1]] * 8, 0, True)
    assert read_live_curve(curve).half_life_seconds == pytest.approx(0.5 * 320 / 8, rel=0.05)


@pytest.mark.parametrize("multiple", [-0.1, 4.1, float("nan")])
def test_a_multiple_out_of_range_is_refused(multiple):
    with pytest.raises(InvalidArgumentError, match="a live curve covers 0 to 4 capacities"):
        read_live_curve(LiveCurve(10, 4, lambda: 0.0), [1, multiple])
