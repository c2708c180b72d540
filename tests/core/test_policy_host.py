"""Cache policies in a pool: what they see, what they decide, and what a broken one leaves behind."""

import inspect
import random

import pytest
from core.policy_pool import (
    BLOCK_SIZE,
    HASHER,
    ChoosesAbsentQueue,
    ChoosesEmptyQueue,
    LosesRuns,
    NamesAbsentQueue,
    ReturnsNothing,
    make_manager,
    raise_in,
    run,
    start,
)

from kv_pool import BlockPool, InvalidArgumentError, Request, RetentionDirective
from kv_pool.contiguous import invariants as run_invariants
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants
from kv_pool.core.cache_policy import LRU, STAY, CachePolicy
from kv_pool.errors import CachePolicyError
from kv_pool.manager.retention.block_retention import BlockRetention


class Noting(CachePolicy):
    """First in, first out; notes each call."""

    def __init__(self):
        super().__init__()
        self.notes = []

    def draw(self, run):
        return run.position // BLOCK_SIZE, run.num_blocks

    def missed(self, key):
        self.notes.append("missed")

    def cached(self, run):
        self.notes.append(("cached", *self.draw(run), run.request_id))

    def hit(self, run):
        self.notes.append(("hit", *self.draw(run)))

    def freed(self, run):
        self.notes.append(("freed", *self.draw(run), run.request_id))
        return 0 if run.queue is None else STAY

    def evicted(self, run, num_blocks):
        self.notes.append(("evicted", *self.draw(run), num_blocks))


def take_notes(manager):
    policy = manager.block_pool.policy_host.policy
    notes, policy.notes = policy.notes, []
    invariants.check(manager.block_pool)
    return notes


def test_a_policy_sees_runs_and_not_blocks():
    manager = make_manager(10, Noting)
    run(manager, "a", range(16))
    assert take_notes(manager) == ["missed", ("cached", 0, 4, "a"), ("freed", 0, 4, "a")]
    run(manager, "b", [*range(8), *range(50, 58)])
    assert take_notes(manager) == [
        "missed",
        ("hit", 0, 2),
        ("cached", 2, 2, "b"),
        ("freed", 2, 2, "b"),
        ("freed", 0, 2, "b"),
    ]
    run(manager, "c", range(100, 124))  # 6 blocks: 4 are free without content
    assert take_notes(manager) == [
        "missed",
        ("evicted", 2, 2, 2),  # of a: the first two blocks are b's, too
        ("cached", 0, 6, "c"),
        ("freed", 0, 6, "c"),
    ]


def test_a_run_tells_its_last_request():
    manager = make_manager(10, Noting)
    first, _, _ = start(manager, "a", range(8))
    first.session_id = "s"
    second, _, _ = start(manager, "b", [*range(8), *range(30, 38)])
    head = manager.block_pool.policy_host.table.find(manager.block_pool.blocks[1])
    assert (head.request_id, head.num_hits, head.num_children) == ("b", 1, 1)
    assert head.cost == pytest.approx(8 * (1 + 4 / 32768))
    manager.free(second)
    manager.free(first)


def test_a_run_tells_the_hints_of_its_last_request():
    class Reading(CachePolicy):
        needs = "kv_hints"

    manager = make_manager(10, Reading)
    host = manager.block_pool.policy_host
    run(manager, "a", range(8))
    request = Request("b", [*range(8), *range(30, 38)], HASHER)
    request.kv_hints = {"ttl_s": 20, "session_id": "s"}
    prefix = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 16 - prefix.num_tokens, prefix)
    manager.free(request)
    assert [(one.hints, one.session_id) for one in host.table.list_runs()] == [(request.kv_hints, "s")] * 2
    run(manager, "c", [*range(8), *range(50, 54)])
    assert [one.hints for one in host.table.list_runs()] == [None, request.kv_hints, None]


@pytest.mark.parametrize("policy", [LRU, None])
def test_a_parent_with_a_copy_may_go_before_its_children(policy):
    """A lookup finds the children behind the copy; vLLM's LRU evicts the block, too."""
    manager = make_manager(8, policy)
    pool = manager.block_pool
    run(manager, "a", range(8))
    request, num_hits, _ = start(manager, "b", range(8))
    assert num_hits == 1  # so its second block is a copy of a's
    request.append_output_token_ids([8, 9, 10, 11])
    manager.allocate_slots(request, 4)
    request.num_computed_tokens = 12
    assert run(manager, "c", range(13)) == 3  # the copy of a, and then b's third block
    manager.free(request)
    taken = pool.get_new_blocks(5)  # four without content, and the least recently freed
    invariants.check(pool)
    pool.free_blocks(taken)
    assert run(manager, "d", range(13)) == 3


def test_blocks_before_a_claimed_one_may_go_first():
    manager = make_manager(8, "lru")
    manager.attach_retention(BlockRetention(manager.block_pool, clock=lambda: 0.0))
    manager.retention.set_directives("a", [RetentionDirective(8, 16, priority=90)])
    first, _, added = start(manager, "a", range(16))
    manager.free(first)
    assert len(manager.block_pool.policy_host.table.list_runs()) == 2
    run(manager, "b", range(100, 108))
    _, _, taken = start(manager, "c", range(200, 216))  # two blocks without content, and two of "a"
    assert sorted(set(taken) & set(added)) == sorted(added[:2])
    invariants.check(manager.block_pool)


def test_a_pool_has_one_policy_and_one_retention():
    for first in ("policy", "retention"):
        pool = BlockPool(5, True, 4, policy="lru" if first == "policy" else None)
        BlockRetention(pool, clock=lambda: 0.0)
        if first == "retention":
            pool.open_policy("lru")
        with pytest.raises(InvalidArgumentError, match="already has a band policy"):
            BlockRetention(pool, clock=lambda: 0.0)
        with pytest.raises(InvalidArgumentError, match=r"already has <PolicyHost of lru.*make another pool"):
            pool.open_policy("fifo")
    with pytest.raises(InvalidArgumentError, match="enable_caching"):
        BlockPool(5, False, 4, policy="lru")


BROKEN = [
    *(raise_in(hook) for hook in ("missed", "cached", "hit", "freed", "choose", "evicted")),
    NamesAbsentQueue,
    ChoosesAbsentQueue,
    ChoosesEmptyQueue,
    ReturnsNothing,
    LosesRuns,
]


def run_several(manager):
    for number in range(6):
        run(manager, f"a{number}", [*range(8), *range(50 * number, 50 * number + 8)])


class RaisesInLibrary(CachePolicy):
    def freed(self, run):
        return random.choice([])


def test_the_line_of_a_broken_policy_is_its_own():
    manager = make_manager(6, RaisesInLibrary)
    run_several(manager)
    line = inspect.getsourcelines(RaisesInLibrary)[1] + 2
    assert str(manager.block_pool.policy_host.failure).endswith(f"({__file__}:{line})")


@pytest.mark.parametrize("pool_type", [BlockPool, RunBlockPool])
@pytest.mark.parametrize("policy", BROKEN, ids=lambda policy: policy.__name__)
def test_a_broken_policy_is_named_and_the_pool_intact(policy, pool_type, caplog):
    manager = make_manager(6, policy, pool_type)
    pool = manager.block_pool
    run_several(manager)
    assert f"cache policy {policy.__name__} is broken" in str(pool.policy_host.failure)
    assert f"cache policy {policy.__name__} is broken" in caplog.text
    (run_invariants if pool_type is RunBlockPool else invariants).check(pool)
    assert manager.get_num_free_blocks() == 6, "blocks were lost"
    assert pool.policy_host.name == "lru"
    assert isinstance(pool.policy_host.failure, CachePolicyError)
    for number in range(5):
        run(manager, f"b{number}", range(100 * number, 100 * number + 16))
        (run_invariants if pool_type is RunBlockPool else invariants).check(pool)


def test_a_policy_that_cannot_start_is_not_opened():
    pool = BlockPool(5, True, 4)
    for policy in (raise_in("start"), raise_in("__init__")):
        with pytest.raises(CachePolicyError, match="BrokenError: in"):
            pool.open_policy(policy)
        assert pool.policy_host is None
    with pytest.raises(InvalidArgumentError, match="derive it from CachePolicy"):
        pool.open_policy(lambda: 3)
    with pytest.raises(InvalidArgumentError, match="num_queues"):
        pool.open_policy(type("Many", (CachePolicy,), {"num_queues": 0}))
    invariants.check(pool)
