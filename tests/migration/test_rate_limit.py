import pytest
from migration.made_nodes import Clock

from kv_pool import InvalidArgumentError
from kv_pool.migration.rate_limit import RateLimit


def test_without_a_limit_nobody_waits():
    limit = RateLimit(0.0, Clock())
    assert limit.take(10**12) == 0.0
    assert limit.count_batch_bytes(100) == 100


def test_whoever_comes_next_waits_for_what_was_taken_before():
    clock = Clock()
    limit = RateLimit(1000.0, clock)
    assert limit.take(600) == 0.0  # 100 were there
    assert limit.take(1000) == pytest.approx(0.5)
    assert limit.take(0) == pytest.approx(1.5)
    clock.now = 1.0
    assert limit.take(0) == pytest.approx(0.5)


def test_a_pause_saves_up_no_more_than_a_tenth_of_a_second():
    clock = Clock()
    limit = RateLimit(1000.0, clock)
    clock.now = 100.0
    assert limit.take(300) == 0.0
    assert limit.take(0) == pytest.approx(0.2)


@pytest.mark.parametrize("seed", range(20))
def test_in_the_long_run_the_rate_is_what_was_said(seed):
    import random

    draw = random.Random(seed)
    clock = Clock()
    rate = draw.uniform(10.0, 1e9)
    limit = RateLimit(rate, clock)
    taken = 0
    for _ in range(200):
        num_bytes = draw.randint(1, limit.count_batch_bytes(2**25))
        clock.now += limit.take(num_bytes)
        assert taken <= rate * (clock.now + 0.1) + 1e-3  # what was read before
        taken += num_bytes
    assert taken >= 0.9 * rate * clock.now - 2**25


def test_a_limit_is_not_negative():
    with pytest.raises(InvalidArgumentError):
        RateLimit(-1.0, Clock())


def test_batches_are_small_enough_to_be_even():
    assert RateLimit(1000.0, Clock()).count_batch_bytes(10**6) == 100
    assert RateLimit(5.0, Clock()).count_batch_bytes(10**6) == 1
