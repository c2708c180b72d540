"""A pool as a site: its offers, frozen sequences, and the outcomes of migrations."""

import pytest
from adapter.made_nodes import running_nodes, take_all
from adapter.made_pool import check, draw, fill, make, make_site, make_storage, read, state, take
from drawing import hash_of

from kv_pool import (
    InvalidArgumentError,
    InvalidBlockError,
    LRUEviction,
    PinnedBlockError,
    PoolExhaustedError,
    UnknownSequenceError,
)
from kv_pool.core.block_keys import make_external_block_hash
from kv_pool.errors import FrozenSequenceError, InvalidContentError, StaleTransferError
from kv_pool.migration.messages import BlocksSubject, PrefixSubject, SequenceSubject


def make_sites(owner=None, **options):
    """1 1 1 2 . . . . . .  and  3 . . . . , all with bytes."""
    here = make(storage=make_storage(), eviction_policy=LRUEviction(), **options)
    there = make(5, device_id=1, storage=make_storage(6), enable_kv_cache_events=True)
    take(here, 1, 3)
    take(here, 2, 1)
    take(there, 3, 1)
    fill(here)
    fill(there)
    sites = make_site(here, owner=owner), make_site(there, owner=owner)
    for site in sites:
        site.gpu_pool = site.sequences.gpu_pool
    return sites


def copy_bytes(source, target, selection, reservation):
    moves = [(selection.blocks[at].block_id, reservation.blocks[at].block_id) for at in reservation.missing]
    source.storage.copy_to(target.storage, moves)


def arrive(source, target, subject, is_move):
    """Run until the target has the blocks and the source does not know it."""
    selection = source.select(subject, is_move)
    if is_move:
        source.freeze(subject, selection.rows)
    reservation = target.reserve(subject, selection.offered, selection.state)
    copy_bytes(source, target, selection, reservation)
    target.insert(reservation)
    return selection, reservation


def migrate(source, target, subject, is_move=True):
    _, reservation = arrive(source, target, subject, is_move)
    new_ids = [block.block_id for block in reservation.blocks]
    if is_move:
        source.release(subject, "b")
    target.adopt(reservation)
    return new_ids


def test_a_sequence_moves_with_its_bytes_hashes_and_priority():
    here, there = make_sites()
    take(here.gpu_pool, 1, 1, priority=2)
    fill(here.gpu_pool)
    hashes = [hash_of(number) for number in (1, 2)]
    here.gpu_pool.cache_prefix(1, hashes)
    migrate(here, there, SequenceSubject(1))
    assert draw(here.gpu_pool) == "**.2......"
    assert draw(there.gpu_pool) == "31111"
    assert read(there.gpu_pool, 1) == [16, 17, 18, 19]
    assert there.gpu_pool.claim_prefix(8, hashes) == there.gpu_pool.blocks_of(1)[:2]
    assert there.gpu_pool.holdings.holders[1].priority == 2
    check(here.gpu_pool)
    check(there.gpu_pool)


def test_a_sequence_arrives_in_scattered_blocks_if_there_is_no_free_run():
    here, there = make_sites()
    for sequence_id in (4, 5):
        take(there.gpu_pool, sequence_id, 1)
    there.gpu_pool.free_sequence(4)
    migrate(here, there, SequenceSubject(1))
    assert draw(there.gpu_pool) == "31511"
    assert read(there.gpu_pool, 1) == [16, 17, 18]
    check(there.gpu_pool)


def test_content_present_at_the_target_is_not_read():
    here, there = make_sites()
    hashes = [hash_of(number) for number in (1, 2)]
    here.gpu_pool.cache_prefix(1, hashes)
    migrate(here, there, PrefixSubject(tuple(hashes)), is_move=False)
    assert draw(there.gpu_pool).count("*") == 2
    _, reservation = arrive(here, there, SequenceSubject(1), True)
    assert reservation.missing == [2]
    here.release(SequenceSubject(1), "b")
    there.adopt(reservation)
    assert read(there.gpu_pool, 1) == [16, 17, 18]
    check(there.gpu_pool)


def test_a_copied_prefix_is_cached_and_announced():
    here, there = make_sites()
    hashes = [hash_of(number) for number in (1, 2, 3)]
    here.gpu_pool.cache_prefix(1, hashes)
    here.gpu_pool.free_sequence(1)
    migrate(here, there, PrefixSubject((*hashes, hash_of(9))), is_move=False)
    external = [make_external_block_hash(block_hash) for block_hash in hashes]
    assert [(event.block_hashes, event.parent_block_hash) for event in there.gpu_pool.take_events()] == [
        ([external[0]], None),
        ([external[1]], external[0]),
        ([external[2]], external[1]),
    ]
    assert len(there.gpu_pool.claim_prefix(8, hashes)) == 3
    assert read(there.gpu_pool, 8) == [16, 17, 18]
    assert draw(here.gpu_pool) == "***2......"
    assert here.select(PrefixSubject((hash_of(9),)), for_move=False).blocks == []
    with pytest.raises(InvalidArgumentError, match="cannot be moved, only copied"):
        here.select(PrefixSubject(tuple(hashes)), for_move=True)


def test_free_cached_blocks_can_only_be_copied():
    here, there = make_sites()
    here.gpu_pool.cache_prefix(1, [hash_of(1), hash_of(2)])
    here.gpu_pool.free_sequence(1)
    migrate(here, there, BlocksSubject((1, 2)), is_move=False)
    assert len(there.gpu_pool.claim_prefix(8, [hash_of(1), hash_of(2)])) == 2
    with pytest.raises(InvalidBlockError, match="block 1 belongs to no sequence"):
        here.select(BlocksSubject((1,)), for_move=True)
    with pytest.raises(InvalidBlockError, match=r"block 5 belongs to no sequence .* and it is not cached"):
        here.select(BlocksSubject((5,)), for_move=False)


def test_a_reused_block_is_refused():
    here, _ = make_sites()
    [block_id] = here.gpu_pool.blocks_of(2)
    generation = here.gpu_pool.block_pool.blocks[block_id].generation
    subject = BlocksSubject((block_id,), (generation,))
    assert here.select(subject, for_move=True).offered[0].generation == generation
    here.gpu_pool.free_sequence(2)
    assert take(here.gpu_pool, 4, 7)
    assert block_id in here.gpu_pool.blocks_of(4)
    with pytest.raises(StaleTransferError, match="was reused since it was named"):
        here.select(subject, for_move=True)
    with pytest.raises(InvalidArgumentError, match="2 generations for 1 blocks"):
        here.select(BlocksSubject((1,), (1, 2)), for_move=False)


ADDING = {
    "allocate": lambda pool: take(pool, 1, 1),
    "claim": lambda pool: pool.claim_prefix(1, [hash_of(1)]),
    "fork into": lambda pool: pool.fork(pool.list_sequences()[-1], 1),
}
TAKING = {
    "fork": lambda pool: pool.fork(1, 7),
    "free": lambda pool: pool.free([2]),
    "free of": lambda pool: pool.free([2], sequence_id=1),
    "free_sequence": lambda pool: pool.free_sequence(1),
    "pin": lambda pool: pool.pin([2]),
    "migrate": lambda pool: pool.migrate_blocks([2], 1),
}


@pytest.mark.parametrize("name", [*ADDING, *TAKING])
def test_a_departing_sequence_is_frozen(name):
    here, there = make_sites()
    here.gpu_pool.connect(there.gpu_pool)
    arrive(here, there, SequenceSubject(1), True)
    before = state(here.gpu_pool)
    with pytest.raises(FrozenSequenceError, match=r"sequence 1 .* is being moved to another node"):
        {**ADDING, **TAKING}[name](here.gpu_pool)
    assert state(here.gpu_pool) == before


@pytest.mark.parametrize("name", ADDING)
def test_the_id_of_an_arriving_sequence_is_frozen(name):
    here, there = make_sites()
    arrive(here, there, SequenceSubject(1), True)
    before = state(there.gpu_pool)
    with pytest.raises(FrozenSequenceError, match=r"sequence 1 .* is being received from another node"):
        ADDING[name](there.gpu_pool)
    assert state(there.gpu_pool) == before


def test_a_migrating_sequence_is_not_evicted_or_moved():
    here, there = make_sites()
    arrive(here, there, SequenceSubject(1), True)
    here.gpu_pool.free_sequence(2)
    take(here.gpu_pool, 4, 1, contiguous="no")
    assert here.gpu_pool.evict(10) == []
    assert here.gpu_pool.list_victims(10) == [4]
    with pytest.raises(PoolExhaustedError, match="too few blocks may be evicted"):
        take(here.gpu_pool, 5, 8)
    ids = here.gpu_pool.blocks_of(1)
    here.gpu_pool.defragment()
    there.gpu_pool.defragment()
    assert here.gpu_pool.blocks_of(1) == ids
    with pytest.raises(InvalidBlockError):
        here.gpu_pool.shrink(9)
    with pytest.raises(FrozenSequenceError):
        here.select(SequenceSubject(1), for_move=True)
    with pytest.raises(FrozenSequenceError):
        here.freeze(SequenceSubject(1), here.select(SequenceSubject(1), for_move=False).rows)
    with pytest.raises(FrozenSequenceError):
        here.select(BlocksSubject((1,)), for_move=True)
    with pytest.raises(FrozenSequenceError):
        there.reserve(SequenceSubject(1), [], b"")
    here.thaw(SequenceSubject(1))
    assert here.gpu_pool.evict(4) == [1, 4]


def test_a_target_in_doubt_keeps_a_cached_copy():
    here, there = make_sites()
    hashes = [hash_of(1), hash_of(2), hash_of(3)]
    here.gpu_pool.cache_prefix(1, hashes)
    _, reservation = arrive(here, there, SequenceSubject(1), True)
    there.release_reservation(reservation)
    here.thaw(SequenceSubject(1))
    assert read(here.gpu_pool, 1) == [16, 17, 18]
    assert draw(there.gpu_pool) == "3***."
    assert len(there.gpu_pool.claim_prefix(1, hashes)) == 3
    assert read(there.gpu_pool, 1) == [16, 17, 18]
    check(there.gpu_pool)


def test_invalid_subjects_are_refused():
    here, there = make_sites()
    with pytest.raises(UnknownSequenceError):
        here.select(SequenceSubject(9), True)
    with pytest.raises(InvalidArgumentError, match="is not a sequence id of a GPUKVPool"):
        here.select(SequenceSubject("request 9"), True)
    here.gpu_pool.pin([2])
    for subject in (SequenceSubject(1), BlocksSubject((1, 2))):
        with pytest.raises(PinnedBlockError, match="block 2 is pinned"):
            here.select(subject, for_move=True)
    assert here.select(SequenceSubject(1), for_move=False).blocks
    with pytest.raises(InvalidArgumentError, match="has no storage"):
        make_site(make())
    selection = here.select(SequenceSubject(1), for_move=False)
    take(there.gpu_pool, 4, 2)
    before = state(there.gpu_pool)
    with pytest.raises(PoolExhaustedError, match=r"cannot reserve 3 blocks .*: 2 of 5 are free"):
        there.reserve(SequenceSubject(1), selection.offered, selection.state)
    assert state(there.gpu_pool) == before
    there.gpu_pool.free_sequence(4)
    take(there.gpu_pool, 1, 1)
    with pytest.raises(InvalidArgumentError, match="sequence 1 already holds blocks on device 1"):
        there.reserve(SequenceSubject(1), selection.offered, selection.state)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (b"\xff", "cannot decode"),
        (b"\x93\x01\x02\x03", "cannot decode"),
        (b"\x93\x91\x01\x81\x01\x09\xc4\x00", "names sequences for 1 of them; expected"),
        (b"\x93\x91\x01\xa1x\xc4\x00", r"cannot decode .*: Expected `object`, got `str`"),
        (b"\x91\x91\x01", "cannot decode"),
        (b"\x90", "cannot decode"),
        (b"\x93\x90\xc0\xc4\x00", "states the priorities|names sequences for 0 of them"),
        (b"\x94\x90\xc0\xc4\x00\x00", r"cannot decode .* at most length 3"),
    ],
)
def test_invalid_source_details_are_refused(said, message):
    here, there = make_sites()
    selection = here.select(SequenceSubject(1), for_move=False)
    before = state(there.gpu_pool)
    for subject in (SequenceSubject(1), BlocksSubject((1, 2, 3))):
        with pytest.raises(InvalidArgumentError, match=message):
            there.reserve(subject, selection.offered, said)
    assert state(there.gpu_pool) == before


class Owner:
    """A sequence owner that records its calls and returns the tokens of its sequences."""

    def __init__(self):
        self.calls = []

    def describe(self, sequence_id):
        return b"state of %d" % sequence_id

    def list_token_ids(self, sequence_id):
        return list(range(10 * sequence_id, 10 * sequence_id + 9))

    def suspend(self, sequence_id):
        self.calls.append(("suspend", sequence_id))

    def resume(self, sequence_id):
        self.calls.append(("resume", sequence_id))

    def on_departed(self, sequence_id, target):
        self.calls.append(("departed", sequence_id, target))

    def expect(self, sequence_id, num_blocks, state):
        if num_blocks > 3:
            raise InvalidArgumentError("too long")
        self.calls.append(("expect", sequence_id, num_blocks, state))

    def on_arrived(self, sequence_id, state):
        self.calls.append(("take over", sequence_id, state))


def test_the_sequence_owner_is_called_and_its_details_migrate():
    owner = Owner()
    here, there = make_sites(owner)
    here.gpu_pool.cache_prefix(1, [hash_of(1), hash_of(2), hash_of(3)])
    migrate(here, there, SequenceSubject(1))
    assert owner.calls == [
        ("suspend", 1),
        ("expect", 1, 3, b"state of 1"),
        ("departed", 1, "b"),
        ("take over", 1, b"state of 1"),
    ]
    assert [event.token_ids for event in there.gpu_pool.take_events()] == [
        [10, 11, 12, 13],
        [14, 15, 16, 17],
        [],
    ]
    owner.calls.clear()
    here.freeze(SequenceSubject(2), here.select(SequenceSubject(2), for_move=True).rows)
    here.thaw(SequenceSubject(2))
    assert owner.calls == [("suspend", 2), ("resume", 2)]


def test_the_target_engine_can_refuse_a_sequence():
    here, there = make_sites(Owner())
    take(here.gpu_pool, 1, 1)
    selection = here.select(SequenceSubject(1), for_move=False)
    before = state(there.gpu_pool)
    with pytest.raises(InvalidArgumentError, match="too long"):
        there.reserve(SequenceSubject(1), selection.offered, selection.state)
    assert state(there.gpu_pool) == before


def test_sharing_a_free_block_counts_as_taking_it():
    here, there = make_sites()
    take(here.gpu_pool, 1, 2)
    hashes = [hash_of(number) for number in (1, 2)]
    here.gpu_pool.cache_prefix(1, hashes)
    migrate(here, there, PrefixSubject(tuple(hashes)), is_move=False)
    selection = here.select(SequenceSubject(1), for_move=True)
    before = state(there.gpu_pool)
    with pytest.raises(PoolExhaustedError, match=r"cannot reserve 3 blocks .*: 2 of 5 are free"):
        there.reserve(SequenceSubject(1), selection.offered, selection.state)
    assert state(there.gpu_pool) == before


def test_two_blocks_with_one_hash_stay_two_blocks():
    here, there = make_sites()
    here.gpu_pool.cache_prefix(1, [hash_of(1), hash_of(1)])
    here.gpu_pool.cache_prefix(2, [hash_of(1)])
    migrate(here, there, PrefixSubject((hash_of(1),)), is_move=False)
    new_ids = migrate(here, there, SequenceSubject(1))
    assert len(set(new_ids)) == 3
    assert read(there.gpu_pool, 1) == [16, 17, 18]
    check(there.gpu_pool)


@pytest.mark.parametrize("is_move", [True, False], ids=["move", "copy"])
def test_content_reported_invalid_during_a_lease_is_lost(is_move):
    with running_nodes(10, 10) as (source, target):
        here, there = source.site.sequences.gpu_pool, target.site.sequences.gpu_pool
        take_all(here, 8)
        hashes = [hash_of(number) for number in range(8)]
        here.cache_prefix(1, hashes)
        subject = SequenceSubject(1) if is_move else PrefixSubject(tuple(hashes))
        limit = 20 * here.storage.block_bytes  # a slow transfer: the report comes before the last batch
        migration = target.fetch(subject, "a", is_move=is_move, max_bytes_per_s=limit)
        while not source.site.leases.list_leases():
            assert not migration.wait_for_end(0.001)
        with here.lock:
            here.block_pool.evict_blocks([3])
        with pytest.raises(InvalidContentError):
            migration.wait(30.0)
        assert there.get_free_blocks() == 10
        assert there.block_pool.find_cached_prefix(hashes, 8) == []
        assert here.blocks_of(1) == [1, 2, 3, 4, 5, 6, 7, 8]
        here.free_sequence(1)
        check(here)
        check(there)
