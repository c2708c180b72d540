"""Random requests through vLLM's scheduler: every block that a step reads has the KV of its prefix."""

import random

import pytest

pytestmark = pytest.mark.vllm

KINDS = [("full",), ("window",), ("full", "window"), ("full", "chunk"), ("window", "full", "window")]


def check_at_rest(engine, num_free):
    """Check that nothing is held, and that the index describes the tiers of every rank."""
    scheduler = engine.connector.scheduler
    assert engine.count_free() == num_free
    assert not engine.scheduler.requests
    assert not scheduler.has_work()
    index = scheduler.index
    assert index.num_arriving == 0
    host = set(index.host.list_keys())
    assert index.host.list_next_evicted(len(host) + 1) == index.host.list_keys()  # no holds
    for rank in engine.ranks:
        for tier, planned in zip(rank.connector.worker.stack.tiers, index.tiers, strict=True):
            assert set(tier.list_keys()) == set(planned.list_keys())


def live(checked, engine, seed, num_requests=40, **options):
    num_free = engine.count_free()
    rng = random.Random(seed)
    counts = checked.live(engine, rng, num_requests, **options)
    check_at_rest(engine, num_free)
    return counts


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("seed", range(3))
def test_loaded_blocks_have_the_right_bytes(checked, make_engine, kinds, seed):
    engine = make_engine(20, 150, kinds=kinds, num_blocks=14 + 14 * len(kinds), events=True)
    counts = live(checked, engine, seed)
    assert counts["external"] > 0
    index = engine.connector.scheduler.index
    assert len(index.host) > 10
    assert len(index.disk) > 10


@pytest.mark.parametrize("kinds", [("wide", "window"), ("wide", "full", "window")], ids="-".join)
@pytest.mark.parametrize("seed", range(2))
def test_groups_with_different_block_sizes(checked, make_engine, kinds, seed):
    engine = make_engine(40, 150, kinds=kinds, num_blocks=70)
    assert live(checked, engine, seed)["external"] > 0
    assert {group.stride for group in engine.connector.scheduler._groups} == {1, 2}


@pytest.mark.parametrize("seed", range(4))
def test_async_scheduling(checked, make_engine, seed):
    engine = make_engine(20, 150, kinds=KINDS[seed % 3], num_blocks=40, is_async=True)
    assert live(checked, engine, seed)["external"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_two_ranks(checked, make_engine, seed):
    engine = make_engine(20, 60, kinds=KINDS[seed % 3], num_blocks=40, num_ranks=2, is_async=seed == 2)
    assert live(checked, engine, seed)["external"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_blocks_outermost(checked, make_engine, seed):
    engine = make_engine(20, 60, kinds=KINDS[seed], num_blocks=40, is_block_outermost=True)
    assert live(checked, engine, seed)["external"] > 0


def test_many_aborts_and_preemptions(checked, make_engine):
    engine = make_engine(12, 30, num_blocks=22)
    counts = live(checked, engine, 5, 80, abort_share=0.4, max_tokens=30)
    assert counts["preempted"] > 0
    assert counts["external"] > 0


def test_a_tier_of_one_block(checked, make_engine):
    live(checked, make_engine(1, 1), 0, 20)


def test_tiers_change_no_output(checked, make_engine):
    outputs = []
    for host in (0, 20):
        engine = make_engine(host, num_blocks=24)
        checked.live(engine, random.Random(3), 30, abort_share=0)
        outputs.append(engine.outputs)
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_lives(checked, make_engine, seed):
    rng = random.Random(seed)
    kinds = rng.choice([*KINDS, ("wide", "window"), ("wide", "full", "window")])
    smallest = 2 if "wide" in kinds else 1  # a wide block is as large as two, and a tier holds at least one
    engine = make_engine(
        rng.randrange(smallest, 40),
        rng.choice([0, rng.randrange(smallest, 200)]),
        kinds=kinds,
        num_blocks=rng.randrange(20, 40) + 12 * len(kinds),
        num_ranks=rng.choice([1, 1, 2]),
        is_async=rng.random() < 0.5,
        events=rng.random() < 0.5,
        is_block_outermost=rng.random() < 0.5,
    )
    live(checked, engine, seed, 60, abort_share=rng.random() * 0.3, max_tokens=rng.randrange(2, 30))
