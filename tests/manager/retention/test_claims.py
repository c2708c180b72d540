"""The claims of many ranges on each block, and stretches that do not overlap."""

import random
import time

import pytest

from kv_pool.manager.retention.block_retention import cut_into_segments
from kv_pool.manager.retention.claims import NO_CLAIMS, Claim, add_claims


def make_claims(rng):
    return [Claim(rng.randrange(5), float(rng.randrange(1, 5))) for _ in range(6)]


def add_claim(claims, claim):
    """The definition of `add_claims`, for one claim."""

    def covers(one, other):
        return not one.is_session and one.strength >= other.strength and one.duration_s >= other.duration_s

    if any(covers(old, claim) for old in claims):
        return claims
    return (*[old for old in claims if old.is_session or not covers(claim, old)], claim)


@pytest.mark.parametrize("seed", range(20))
def test_each_block_has_the_claims_of_the_ranges_one_by_one(seed):
    rng = random.Random(seed)
    claims = make_claims(rng)
    for _ in range(50):
        first, num_blocks = rng.randrange(4), rng.randrange(1, 12)
        ranges = []
        for _ in range(rng.randrange(1, 9)):
            start = rng.randrange(50)
            end = rng.choice([None, start + rng.randrange(1, 30)])
            ranges.append((start, end, rng.choice(claims)))
        segments = cut_into_segments(ranges, first, num_blocks, 4)
        found = [NO_CLAIMS] * num_blocks
        for low, high, claims_there in segments:
            assert 0 <= low < high <= num_blocks
            assert claims_there
            assert not any(found[low:])  # in order, and none twice
            found[low:high] = [claims_there] * (high - low)
        assert len(segments) <= 2 * len(ranges) - 1
        for index, claims_there in enumerate(found, first):
            expected = NO_CLAIMS
            for start, end, claim in ranges:
                if start // 4 <= index and (end is None or index * 4 < end):
                    expected = add_claim(expected, claim)
            kinds = {(claim.strength, claim.duration_s) for claim in claims_there}
            assert kinds == {(claim.strength, claim.duration_s) for claim in expected}
            assert len(claims_there) == len(expected)


def test_the_claims_of_many_ranges_take_linear_time():
    """A client's request with 10,000 directives stopped the scheduler for seconds."""
    claim = Claim(50, 1.0)
    ranges = [(4 * place, 4 * place + 4, claim) for place in range(10_000)]
    started = time.process_time()
    assert cut_into_segments(ranges, 0, 10_000, 4) == [(0, 10_000, claim.alone)]
    assert time.process_time() - started < 1


@pytest.mark.parametrize("seed", range(20))
def test_several_claims_are_added_as_one_by_one(seed):
    rng = random.Random(seed)
    claims = make_claims(rng)
    session = Claim(rng.randrange(5), float("inf"), 9.0)
    for _ in range(50):
        before = session.alone if rng.random() < 0.3 else NO_CLAIMS
        for claim in rng.sample(claims, rng.randrange(4)):
            before = add_claim(before, claim)
        added = NO_CLAIMS
        for claim in rng.sample(claims, rng.randrange(1, 4)):
            added = add_claim(added, claim)
        expected = before
        for claim in added:
            expected = add_claim(expected, claim)
        found = add_claims(before, added)
        assert {(claim.strength, claim.duration_s) for claim in found} == {
            (claim.strength, claim.duration_s) for claim in expected
        }
        assert len(found) == len(expected)
        assert (found is before) == (expected is before)
