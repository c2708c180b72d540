"""Builds small comparisons for tests, and an executor that counts its jobs."""

import random
from concurrent.futures import Executor, Future

from lab.made_trace import make_random_records, write_trace

from kv_pool.lab.compare.comparison import ComparedTrace, CompareSettings
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.worker_processes import report_share

MINE = """
from kv_pool.core.cache_policy import CachePolicy


class Mine(CachePolicy):
    num_queues = 2

    def freed(self, run):
        return 1 if run.num_hits else 0

    def choose(self):
        new, hit = self.queues
        return 0 if new.first is not None else 1


class Broken(CachePolicy):
    def freed(self, run):
        raise ValueError("a bug\\nin two lines")
"""


class CountingExecutor(Executor):
    """Runs each job at once, in this thread, and counts it."""

    def __init__(self):
        self.num_jobs = 0

    def submit(self, fn, /, *args, **kwargs):
        self.num_jobs += 1
        future = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def write_random_trace(path, seed, num_requests=150, num_sessions=0):
    """Write a random trace of blocks of 8 tokens, with session ids if there are sessions."""
    rng = random.Random(seed)
    records = make_random_records(rng, num_requests, 8, partial_ids=True)
    if num_sessions:
        for record in records:
            record["session_id"] = f"s{rng.randrange(num_sessions)}"
    return str(write_trace(path, records))


def make_settings(paths, policies, capacities=(12, 30), resamples=20, seed=0, **options):
    options = {"trace_block_size": 8, **options}
    traces = [ComparedTrace(ReplaySettings(str(path), 1, **options), tuple(capacities)) for path in paths]
    return CompareSettings(tuple(traces), tuple(policies), resamples, seed)


def report_and_wait(path):
    """Report half of a job, and end it when a file appears."""
    report_share("halfway", 0.5)
    while not path.exists():
        pass
    return "done"
