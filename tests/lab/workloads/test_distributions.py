"""Distributions: their notation, and that samples follow them."""

import math

import pytest

from kv_pool import InvalidArgumentError
from kv_pool.lab.workloads.distributions import Distribution, RandomStream, ZipfSampler

NUM_SAMPLES = 20_000
# The Kolmogorov-Smirnov distance of correct samples exceeds this with a probability of 2e-6.
LIMIT = 2.6 / math.sqrt(NUM_SAMPLES)


def measure_distance(samples, cdf):
    """Return the greatest distance between the samples' shares and a distribution function."""
    samples = sorted(samples)
    n = len(samples)
    return max(max(cdf(x) - i / n, (i + 1) / n - cdf(x)) for i, x in enumerate(samples))


def measure_step_distance(samples, cdf):
    """The same for integers, where a share counts equal samples together."""
    n = len(samples)
    distances = []
    for value in set(samples):
        distances.append(abs(sum(one <= value for one in samples) / n - cdf(value)))
    return max(distances)


def normal_cdf(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


CDFS = {
    "uniform:3:8": lambda x: (x - 3) / 5,
    "exponential:343": lambda x: 1 - math.exp(-x / 343),
    "lognormal:5200:1.3": lambda x: normal_cdf(math.log(x / 5200) / 1.3),
    "lognormal:1:0.1": lambda x: normal_cdf(math.log(x) / 0.1),
}


@pytest.mark.parametrize("text", CDFS)
def test_continuous_samples_follow_the_distribution(text):
    stream = RandomStream(5)
    distribution = Distribution.parse(text)
    samples = [distribution.sample(stream) for _ in range(NUM_SAMPLES)]
    assert measure_distance(samples, CDFS[text]) < LIMIT


@pytest.mark.parametrize("mean", [1.0, 1.001, 2.5, 40.0])
def test_geometric_samples_follow_the_distribution(mean):
    stream = RandomStream(6)
    distribution = Distribution("geometric", mean)
    samples = [distribution.sample(stream) for _ in range(NUM_SAMPLES)]
    assert all(sample == int(sample) >= 1 for sample in samples)
    assert measure_step_distance(samples, lambda x: 1 - (1 - 1 / mean) ** x) < LIMIT


def test_fixed_samples_take_nothing_from_the_stream():
    one, other = RandomStream(1), RandomStream(1)
    assert Distribution("fixed", 768).sample(one) == 768
    assert one.take_uniform() == other.take_uniform()


def test_counts_are_rounded_and_have_a_minimum():
    stream = RandomStream(1)
    assert Distribution("fixed", 2.5).sample_count(stream) == 3
    assert Distribution("fixed", 0.2).sample_count(stream) == 1
    assert Distribution("fixed", 0.2).sample_count(stream, 0) == 0


def test_normal_numbers_are_normal():
    stream = RandomStream(7)
    assert measure_distance([stream.take_normal() for _ in range(NUM_SAMPLES)], normal_cdf) < LIMIT


def test_streams_of_different_seeds_differ():
    firsts = [RandomStream(seed).take_uniform() for seed in (-2, -1, 0, 1, 2)]
    assert len(set(firsts)) == 5


@pytest.mark.parametrize(
    "text", ["fixed:3", "uniform:1:2.5", "exponential:1", "geometric:1", "lognormal:3:0"]
)
def test_text_is_read_and_written(text):
    assert str(Distribution.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a distribution; write fixed:VALUE"),
        ("normal:1:2", "'normal:1:2' is not a distribution"),
        ("fixed", "'fixed' is not a distribution"),
        ("fixed:1:2", "is not a distribution"),
        ("fixed:x", "has a parameter that is not a number"),
        ("fixed:-1", "-1.0 is not in 0..1e+12"),
        ("fixed:nan", "nan is not in 0..1e+12"),
        ("fixed:inf", "inf is not in 0..1e+12"),
        ("uniform:3:2", "HIGH is below LOW"),
        ("lognormal:0:1", "MEDIAN must be above 0"),
        ("lognormal:3:11", "SIGMA at most 10"),
        ("geometric:0.5", "MEAN must be 1 or more"),
    ],
)
def test_invalid_text_is_refused(text, message):
    with pytest.raises(InvalidArgumentError) as caught:
        Distribution.parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(("num_items", "exponent"), [(1, 1.0), (2, 0.0), (100, 0.96), (50, 3.0)])
def test_ranks_follow_the_power_law(num_items, exponent):
    stream = RandomStream(8)
    zipf = ZipfSampler(num_items, exponent)
    weights = [(rank + 1) ** -exponent for rank in range(num_items)]
    samples = [zipf.take_rank(stream) for _ in range(NUM_SAMPLES)]
    assert set(samples) <= set(range(num_items))
    shares = [sum(weights[: rank + 1]) / sum(weights) for rank in range(num_items)]
    assert measure_step_distance(samples, lambda rank: shares[rank]) < LIMIT


@pytest.mark.parametrize(("num_items", "exponent"), [(0, 1.0), (10**9, 1.0), (5, -1.0), (5, float("nan"))])
def test_invalid_power_laws_are_refused(num_items, exponent):
    with pytest.raises(InvalidArgumentError):
        ZipfSampler(num_items, exponent)
