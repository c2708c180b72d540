"""Call latencies: the figures, and the count of all calls from any number of threads."""

import random
import statistics
import threading

import pytest

from kv_pool.reports.latency import TIMED_EVERY, LatencyWindow


def call(window, num_calls):
    for _ in range(num_calls):
        if window.number_call() % TIMED_EVERY == 0:
            window.note(1000)


def summarize(durations):
    window = LatencyWindow()
    for duration in durations:
        window.note(duration)
    return window.summarize()


def test_figures_are_zero_without_calls():
    latency = LatencyWindow().summarize()
    assert (latency.num_calls, latency.num_timed, latency.mean_us, latency.max_us) == (0, 0, 0.0, 0.0)


def test_summarize_does_not_count_as_a_call():
    window = LatencyWindow()
    for num_calls in range(5):
        assert window.summarize().num_calls == num_calls
        call(window, 1)


def test_only_the_latest_durations_are_kept():
    window = LatencyWindow(max_kept=10)
    call(window, 50 * TIMED_EVERY)
    latency = window.summarize()
    assert (latency.num_calls, latency.num_timed) == (50 * TIMED_EVERY, 10)


@pytest.mark.parametrize("seed", range(20))
def test_figures_agree_with_the_statistics_module(seed):
    draw = random.Random(seed)
    durations = [draw.randint(1, 100_000) for _ in range(draw.randint(1, 300))]
    latency = summarize(durations)
    assert latency.num_timed == len(durations)
    assert latency.mean_us == pytest.approx(statistics.mean(durations) / 1000)
    assert latency.median_us == pytest.approx(statistics.median(durations) / 1000)
    assert latency.max_us == max(durations) / 1000
    assert sum(duration / 1000 <= latency.p99_us for duration in durations) >= 0.99 * len(durations)
    assert sum(duration / 1000 >= latency.p99_us for duration in durations) > 0.01 * len(durations) - 1


def test_of_100_calls_the_99th_percentile_is_the_99th():
    assert summarize(range(1000, 101_000, 1000)).p99_us == 99.0


def test_calls_from_many_threads_are_all_counted():
    window = LatencyWindow()
    threads = [threading.Thread(target=call, args=(window, 5000)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert window.summarize().num_calls == 40_000
