"""Requests that are freed, resumed, forked and migrated generate the same tokens."""

import pytest
from integrations.transformers.made_model import (
    BLOCK_SIZE,
    HASHER,
    check_kv,
    generate,
    make_model,
    make_request,
    make_sequences,
    run_step,
)
from integrations.transformers.moved_blocks import spoil_empty

from kv_pool import BlockPool, ControlError, CopyFailedError, InvalidArgumentError, KVCacheManager
from kv_pool.manager.requests.request import dump_request

pytestmark = pytest.mark.transformers

PROMPT = tuple(range(10, 31))
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def break_off(*arguments):
    raise OSError("unplugged")


@pytest.fixture
def started():
    """Return sequences and a request with a computed prompt and three new tokens: 23 tokens have K and V."""
    sequences = make_sequences()
    request = make_request("r", PROMPT)
    sequences.admit(request)
    run_step(make_model(), sequences, [request], [21])
    for _ in range(2):
        run_step(make_model(), sequences, [request], [1])
    return sequences, request


def test_request_that_does_not_fit_is_not_admitted(started):
    sequences, request = started
    pool = sequences.manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    assert sequences.admit(make_request("other", range(40, 50))) is None
    pool.free_blocks(taken)
    generate(sequences, request, 10)


def test_fork_shares_blocks_until_one_writes(started, monkeypatch):
    sequences, request = started
    child = make_request("child", [*request.all_token_ids[:23], 50])
    sequences.fork(request, child)
    ids, child_ids = (sequences.manager.get_block_ids(name) for name in ("r", "child"))
    assert ids == child_ids
    assert sequences.reserve(child, 1)
    monkeypatch.setattr(sequences.storage, "_copy", break_off)
    with pytest.raises(CopyFailedError, match="unplugged"):
        sequences.begin_step()
    monkeypatch.undo()  # the copies of the step are still to be made
    target = make_sequences(20)
    assert sequences.migrate(child, target)
    check_kv(target, child)
    assert sequences.manager.get_block_ids("r") == ids
    sequences.fork(request, child := make_request("child", [*request.all_token_ids[:23], 50]))
    reports = sequences.describe_sequences().sequences
    assert [(report.sequence_id, report.num_blocks) for report in reports] == [("r", 6), ("child", 6)]
    generate(sequences, child, 10)
    generate(sequences, request, 10)


def test_fork_requires_the_same_tokens(started):
    sequences, request = started
    for token_ids in (request.all_token_ids[:22], [1, *request.all_token_ids[1:]]):
        child = make_request("child", token_ids)
        with pytest.raises(InvalidArgumentError, match="are not those of its parent"):
            sequences.fork(request, child)
        assert child.num_computed_tokens == 0
    generate(sequences, request, 10)


def test_migration_copies_only_blocks_not_cached_in_the_target(started):
    sequences, request = started
    target = make_sequences(20)
    there = make_request("there", PROMPT[:14])
    target.admit(there)
    run_step(make_model(), target, [there], [14])
    assert sequences.migrate(request, target)
    shared = target.manager.get_block_ids("there")[:3]
    assert target.manager.get_block_ids("r")[:3] == shared
    generate(target, request, 10)


def test_request_stays_if_the_target_is_full_or_the_copy_fails(started, monkeypatch):
    sequences, request = started
    held = sequences.manager.get_block_ids("r")
    assert not sequences.migrate(request, make_sequences(6))
    target = make_sequences(20)

    monkeypatch.setattr(sequences.storage, "_copy", break_off)
    with pytest.raises(CopyFailedError, match="unplugged"):
        sequences.migrate(request, target)
    monkeypatch.undo()
    assert target.manager.usage == 0
    assert request.num_computed_tokens == 23
    assert sequences.manager.get_block_ids("r") == held
    with pytest.raises(InvalidArgumentError, match="already in the target pool"):
        sequences.migrate(request, sequences)
    generate(sequences, request, 10)


def test_a_damaged_state_is_refused_before_the_request_leaves(started):
    _, request = started
    from kv_pool.integrations.transformers.sequences import _RequestOwner  # needs torch

    owner, state = _RequestOwner({}, HASHER), dump_request(request)
    owner.expect("r", 6, state)
    for request_id, said in (("r", state[:-3]), ("r", b""), ("other", state)):
        with pytest.raises(InvalidArgumentError):
            owner.expect(request_id, 6, said)


@pytest.fixture
def scattered(started):
    """As `started`, with the request's 6 blocks at every second id from the top, and no others below."""
    sequences, request = started
    pool = sequences.manager.block_pool
    ids = sequences.manager.get_block_ids("r")
    moves = list(zip(ids, range(39, 27, -2), strict=True))
    sequences.storage.apply_moves(moves)
    pool.swap_block_ids(moves)
    spoil_empty(sequences)
    return sequences, request


def test_failed_copy_moves_no_request(scattered, monkeypatch):
    sequences, request = scattered
    held = sequences.manager.get_block_ids("r")

    monkeypatch.setattr(sequences.storage, "_copy", break_off)
    for attempt in (sequences.defragment, lambda: sequences.take_run(30)):
        with pytest.raises(CopyFailedError, match="unplugged"):
            attempt()
        assert sequences.manager.get_block_ids("r") == held
    monkeypatch.undo()
    generate(sequences, request, 10)


def test_pool_without_runs_cannot_be_defragmented():
    from kv_pool.integrations.transformers import PagedSequences

    storage = make_sequences().storage
    sequences = PagedSequences(KVCacheManager(BlockPool(40, True, BLOCK_SIZE)), storage)
    for attempt in (sequences.defragment, lambda: sequences.take_run(2)):
        with pytest.raises(ControlError, match="this manager has a BlockPool"):
            attempt()
    assert sequences.get_fragmentation_rate() == 0.0


def test_defragment_during_an_arriving_prefix_keeps_k_and_v():
    """The second half used to overwrite K and V of other requests, and was missing in its own blocks."""
    import threading

    from migration.made_nodes import HalvingBackend

    from kv_pool.migration.backends.in_process import InProcessBackend
    from kv_pool.migration.messages import PrefixSubject
    from kv_pool.migration.migrator import Migrator

    sides = [make_sequences(), make_sequences()]
    there, here = sides
    running = {}

    def admit(sequences, name, prompt):
        running[name] = make_request(name, prompt)
        sequences.admit(running[name])
        run_step(make_model(), sequences, [running[name]], [running[name].num_tokens])

    for number in range(3):
        admit(here, str(number), range(40 + 10 * number, 49 + 10 * number))
    admit(there, "computed there", PROMPT)
    lock = threading.RLock()
    num_moved = []

    def defragment():
        with lock:
            here.free(running.pop("0"))
            num_moved.append(here.defragment(max_evictions=20))
            admit(here, "new", range(70, 90))

    backends = [InProcessBackend(there.storage), HalvingBackend(here.storage, defragment)]
    sites = [there.make_site(HASHER, {}), here.make_site(HASHER, {}, lock)]
    assert here.lock is lock  # one lock for all users of the pool
    with (
        Migrator("there", sites[0], backends=backends[:1]) as source,
        Migrator("here", sites[1], backends=backends[1:]) as target,
    ):
        target.connect(source)
        prefix = PrefixSubject(tuple(HASHER.hash_blocks(PROMPT)))
        assert len(target.fetch(prefix, "there", hold_s=60.0).wait(30.0)) == 5
        with lock:
            here.defragment()
            arrived = make_request("arrived", PROMPT)
            assert here.admit(arrived) == 20
            for request in (arrived, running["1"], running["2"], running["new"]):
                check_kv(here, request)
    assert num_moved[0] > 0
