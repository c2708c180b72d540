import pytest
from migration.made_nodes import Clock

from kv_pool import InvalidArgumentError
from kv_pool.migration.verified_reads import RateLimit


def test_without_a_limit_reads_do_not_wait():
    limit = RateLimit(0.0, Clock())
    assert limit.take(10**12) == 0.0
    assert limit.count_batch_bytes(100) == 100


def test_each_read_waits_for_itself_and_earlier_reads():
    clock = Clock()
    limit = RateLimit(1000.0, clock)
    assert limit.take(600) == pytest.approx(0.6)
    assert limit.take(1000) == pytest.approx(1.6)
    clock.now += 1.0
    assert limit.take(0) == pytest.approx(0.6)


def test_a_short_migration_does_not_exceed_the_rate():
    """Regression: the first tenth of a second's bytes, and any single block, ignored the limit."""
    clock = Clock()
    limit = RateLimit(1000.0, clock)
    began = clock.now
    for _ in range(5):
        clock.now += limit.take(50)
    assert clock.now - began == pytest.approx(0.25)


def test_a_pause_gives_no_credit():
    clock = Clock()
    limit = RateLimit(1000.0, clock)
    clock.now += limit.take(300)
    clock.now += 100.0
    assert limit.take(300) == pytest.approx(0.3)


def test_the_duration_of_reads_does_not_lower_the_rate():
    clock = Clock()
    limit = RateLimit(1000.0, clock)
    began = clock.now
    for _ in range(100):
        clock.now += limit.take(100)
        clock.now += 0.05
    assert clock.now - began == pytest.approx(10.05)


@pytest.mark.parametrize("seed", range(20))
def test_the_long_term_rate_equals_the_limit(seed):
    import random

    draw = random.Random(seed)
    clock = Clock()
    rate = draw.uniform(10.0, 1e9)
    limit = RateLimit(rate, clock)
    taken = 0
    for _ in range(200):
        num_bytes = draw.randint(1, limit.count_batch_bytes(2**25))
        clock.now += limit.take(num_bytes)
        taken += num_bytes
        assert taken <= rate * clock.now * (1 + 1e-9)
        clock.now += draw.uniform(0.0, 0.02)  # the read itself
    assert taken >= 0.9 * rate * clock.now - 2**25


def test_a_negative_limit_is_refused():
    with pytest.raises(InvalidArgumentError):
        RateLimit(-1.0, Clock())


def test_batches_have_at_most_a_tenth_of_a_second():
    assert RateLimit(1000.0, Clock()).count_batch_bytes(10**6) == 100
    assert RateLimit(5.0, Clock()).count_batch_bytes(10**6) == 1
