"""What `/ready` says of real pools, publishers and nodes."""

import asyncio
from contextlib import nullcontext

import pytest
from adapter.made_pool import make, take
from control.raw_client import STATS, RawClient
from control.test_live_node import folder, served  # noqa: F401  # a fixture

from kv_pool.control.commands import PoolCommands
from kv_pool.control.health import Health
from kv_pool.control.messages import TierList
from kv_pool.core.kv_events import AllBlocksCleared
from kv_pool.events import PublisherConfig, ZMQEventPublisher
from kv_pool.reports.pool_reading import PoolSources
from kv_pool.threads import Workers
from kv_pool.tiers.tier import TierStatistics


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def make_health(pool, clock, **parts):
    sources = PoolSources(pool=pool, **parts)
    return Health(PoolCommands(pool, sources, "c.sock", nullcontext(), ""), Workers("health", 1), clock)


def check(health, clock):
    """Return what a check finds a second after the last one."""
    clock.now += 1.0
    report = asyncio.run(health.get_report())
    assert report.is_ready == (set(report.checks.values()) == {"ok"})
    return report.checks


def test_interrupted_pool_is_not_ready_until_the_repair():
    pool, clock = make(), Clock()
    take(pool, 1, 3)
    health = make_health(pool, clock)
    assert check(health, clock) == {"pool": "ok"}
    pool.block_pool.is_changing = True
    assert "an earlier call of this pool was interrupted" in check(health, clock)["pool"]
    pool.repair()
    assert check(health, clock) == {"pool": "ok"}
    assert (pool.block_pool.num_checks, pool.block_pool.num_failed_checks) == (32, 0)


def test_broken_invariant_of_any_block_is_found_and_stays():
    pool, clock = make(10_000), Clock()
    health = make_health(pool, clock)
    pool.block_pool.blocks[9_000].ref_cnt = 1
    found = [check(health, clock)["pool"] for _ in range(4)]
    broken = "CorruptedPoolError: Q3: block 9000 has ref_cnt 1 and is in the free queue"
    assert found == ["ok", "ok", broken, broken]
    assert pool.block_pool.num_failed_checks == 2


def test_pool_whose_lock_is_kept_is_not_ready():
    pool, clock = make(), Clock()
    health = make_health(pool, clock)
    assert check(health, clock) == {"pool": "ok"}
    with pool.lock:
        assert check(health, clock) == {"pool": "ok"}  # a long step
        clock.now += 10
        assert check(health, clock) == {"pool": "no check has ended for 10 s; is its lock held?"}


def test_blocks_that_cannot_be_written_are_a_problem_for_a_minute():
    clock, disk = Clock(), TierStatistics("STORAGE", 100, num_write_errors=7)
    health = make_health(make(), clock, tiers=lambda: TierList({}, [disk]))
    assert check(health, clock)["tiers"] == "ok"
    disk.num_write_errors = 8
    assert check(health, clock)["tiers"] == "blocks could not be written in the last minute; so far: 8"
    clock.now += 60
    assert check(health, clock)["tiers"] == "ok"


def test_dropped_batches_of_events_are_a_problem():
    clock = Clock()
    with ZMQEventPublisher(PublisherConfig(endpoint="inproc://health", max_queue_size=1)) as publisher:
        health = make_health(make(), clock, publisher=publisher)
        assert check(health, clock)["publisher"] == "ok"
        while not publisher.get_statistics().num_batches_dropped:
            publisher.publish([AllBlocksCleared()])
        assert (
            "batches of events were dropped or failed in the last minute" in check(health, clock)["publisher"]
        )


@pytest.mark.parametrize(("listen", "status"), [("127.0.0.1:0", 200), (None, 503)])
def test_node_is_ready_while_its_peers_answer(folder, listen, status):  # noqa: F811
    with served("b") as (_, b):
        there = b.migrator.address if listen else "127.0.0.1:1"
        with served("a", peer=[f"b={there}"]), RawClient(folder / "kv_pool" / "control-a.sock") as client:
            while (found := client.ask(STATS.replace(b"v1/stats", b"ready")))[1]["checks"].keys() != {
                "pool",
                "peers",
            }:
                pass
    assert found[0] == status
    assert found[1]["checks"]["peers"].startswith("ok" if listen else "b: ")
