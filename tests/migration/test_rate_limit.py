import random

import pytest
from migration.made_nodes import Clock

from kv_pool import InvalidArgumentError
from kv_pool.migration.verified_reads import RateLimit


def test_without_a_limit_reads_do_not_wait():
    assert RateLimit(0.0, Clock()).take(10**12) == 0.0


def test_each_read_waits_for_itself_and_earlier_reads():
    """Regression: the first tenth of a second's bytes, and any single block, ignored the limit."""
    clock = Clock()
    limit = RateLimit(1000.0, clock)
    assert limit.take(50) == pytest.approx(0.05)
    assert limit.take(1000) == pytest.approx(1.05)
    clock.now += 1.0
    assert limit.take(0) == pytest.approx(0.05)
    clock.now += 100.0  # a pause gives no credit
    assert limit.take(300) == pytest.approx(0.3)


@pytest.mark.parametrize("seed", range(20))
def test_the_long_term_rate_equals_the_limit(seed):
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


def test_batches_have_at_most_a_tenth_of_a_second():
    with pytest.raises(InvalidArgumentError):
        RateLimit(-1.0, Clock())
    sizes = [RateLimit(rate, Clock()).count_batch_bytes(10**6) for rate in (0.0, 1000.0, 5.0)]
    assert sizes == [10**6, 100, 1]
