"""Random calls on two pools and migrations between them, aborted at any step, against a slow model.

The model stores sequences as lists of the numbers written in their blocks. A migration runs step by step, as
a migrator drives it, with leases at the source.
"""

import itertools
import random
from contextlib import suppress

import pytest
from adapter.made_pool import check, make, make_site, make_storage, read, read_block, take, write
from drawing import hash_of

from kv_pool import (
    InvalidArgumentError,
    InvalidBlockError,
    LRUEviction,
    OutOfBlocksError,
    UnknownSequenceError,
)
from kv_pool.contiguous.run_index import PLACEMENTS
from kv_pool.errors import FrozenSequenceError
from kv_pool.migration.messages import BlocksSubject, PrefixSubject, SequenceSubject
from kv_pool.protocol import NO_SEQUENCE

NUM_BLOCKS = 20
NUM_STEPS = 150
FOREVER = float("inf")


class Side:
    """A pool, its site, and the expected contents of its sequences."""

    def __init__(self, draw, device_id):
        self.evicted = []
        self.pool = make(
            NUM_BLOCKS,
            device_id=device_id,
            storage=make_storage(NUM_BLOCKS + 1),
            reserved_blocks=draw.choice([0, 2]),
            eviction_policy=draw.choice([None, LRUEviction()]),
            on_evicted=lambda sequence_id, ids: self.evicted.append(sequence_id),
            on_moved=draw.choice([None, lambda relocation: None]),
            placement=draw.choice(PLACEMENTS),
        )
        self.site = make_site(self.pool)
        self.contents = {}

    def list_frozen(self):
        return set(self.pool.holdings.frozen)


class Moving:
    """One migration: its subject, its selection, and its progress."""

    def __init__(self, source, target, subject, is_move):
        self.source, self.target, self.subject, self.is_move = source, target, subject, is_move
        selection = source.site.select(subject, is_move)
        self.selection = selection
        if is_move:
            source.site.freeze(subject, selection.rows)
        self.lease = source.site.leases.acquire(selection.blocks, FOREVER, "the target")
        self.reservation = None
        self.has_departed = False
        self.numbers = [read_block(source.pool, block.block_id) for block in selection.blocks]
        self.holders = [NO_SEQUENCE] * len(selection.blocks)
        if isinstance(subject, SequenceSubject):
            self.holders = [subject.sequence_id] * len(selection.blocks)
        elif isinstance(subject, BlocksSubject):
            infos = [source.pool.get_block_info(block_id) for block_id in subject.block_ids]
            self.holders = [info.sequence_id for info in infos]
        self.steps = [self.reserve, self.read, self.insert, self.acknowledge, self.adopt]

    def reserve(self):
        target = self.target
        self.reservation = target.site.reserve(self.subject, self.selection.offered, self.selection.state)

    def read(self):
        moves = [
            (self.selection.offered[at].block_id, self.reservation.blocks[at].block_id)
            for at in self.reservation.missing
        ]
        self.source.pool.storage.copy_to(self.target.pool.storage, moves)

    def insert(self):
        self.target.site.insert(self.reservation)

    def acknowledge(self):
        self.has_departed = True
        if self.is_move:
            self.source.site.release(self.subject, "the target")
            for holder, number in zip(self.holders, self.numbers, strict=True):
                self.source.contents[holder].remove(number)
            forget_empty(self.source)
        self.lease.release()

    def adopt(self):
        self.target.site.adopt(self.reservation)
        for holder, number in zip(self.holders, self.numbers, strict=True):
            if holder != NO_SEQUENCE:
                self.target.contents.setdefault(holder, []).append(number)
        self.reservation = None

    def break_off(self):
        """Abort as if the next step failed; not possible after the source has released its blocks."""
        if self.has_departed:
            self.adopt()
            return
        if self.reservation is not None:
            self.target.site.release_reservation(self.reservation)
            self.reservation = None
        if self.is_move:
            self.source.site.thaw(self.subject)
        self.lease.release()

    def go_on(self):
        self.steps.pop(0)()


def forget_empty(side):
    side.contents = {sequence_id: held for sequence_id, held in side.contents.items() if held}


def compare(side):
    pool = side.pool
    assert sorted(pool.list_sequences()) == sorted(side.contents)
    for sequence_id, numbers in side.contents.items():
        assert read(pool, sequence_id) == numbers, f"sequence {sequence_id} of device {pool.device_id}"


def call_pool(draw, side, numbers):
    """Make one ordinary call, and update the model."""
    pool, contents = side.pool, side.contents
    name = draw.choice(["allocate"] * 4 + ["free", "free_sequence", "fork", "pin", "cache", "defragment"])
    sequence_id = draw.choice([*contents, draw.randrange(6)])
    held = pool.blocks_of(sequence_id)
    frozen = side.list_frozen()
    try:
        if name == "allocate":
            ids = take(pool, sequence_id, draw.randint(1, 5), priority=draw.choice([0, 0, 1]))
            assert sequence_id not in frozen
            for victim in side.evicted:
                assert victim not in frozen
                del contents[victim]
            for block_id in ids:
                number = next(numbers)
                write(pool, block_id, number)
                contents.setdefault(sequence_id, []).append(number)
        elif name == "free" and held:
            at = draw.randrange(len(held))
            pool.free([held[at]], sequence_id=sequence_id)
            assert sequence_id not in frozen
            del contents[sequence_id][at]
        elif name == "free_sequence" and held:
            pool.free_sequence(sequence_id)
            assert sequence_id not in frozen
            del contents[sequence_id]
        elif name == "fork" and held and 7 not in contents:
            pool.fork(sequence_id, 7)
            assert not {sequence_id, 7} & frozen
            contents[7] = list(contents[sequence_id])
        elif name == "pin" and held:
            pool.pin(held[:1])
            pool.unpin(held[:1])
        elif name == "cache" and held:
            # A block's hash identifies the number written in it.
            hashes = [hash_of(number) for number in contents[sequence_id]]
            pool.cache_prefix(sequence_id, hashes[: draw.randint(1, len(hashes))])
        elif name == "defragment":
            pool.defragment(max_evictions=draw.choice([0, 2]))
        forget_empty(side)
    except FrozenSequenceError:
        assert frozen
    except OutOfBlocksError:
        assert not side.evicted
    side.evicted.clear()


def choose_subject(draw, side):
    pool = side.pool
    kind = draw.choice(["sequence", "sequence", "blocks", "prefix"])
    sequence_id = draw.choice([*side.contents, draw.randrange(8)])
    if kind == "sequence":
        return SequenceSubject(sequence_id), draw.random() < 0.7
    if kind == "prefix":
        numbers = side.contents.get(sequence_id, [1, 2])
        return PrefixSubject(tuple(hash_of(number) for number in numbers)), False
    ids = draw.sample(range(1, NUM_BLOCKS + 1), draw.randint(1, 3))
    if draw.random() < 0.8:
        held = pool.blocks_of(sequence_id)
        ids = draw.sample(held, draw.randint(0, min(4, len(held))))
    generations = tuple(pool.block_pool.blocks[block_id].generation for block_id in ids)
    return BlocksSubject(tuple(ids), draw.choice([(), generations])), draw.random() < 0.7


@pytest.mark.parametrize("seed", range(30))
def test_two_migrating_pools_behave_like_the_slow_model(seed):
    draw = random.Random(seed)
    sides = [Side(draw, 0), Side(draw, 1)]
    movings = []
    numbers = itertools.count(1)
    for _ in range(NUM_STEPS):
        match draw.choice(["call", "call", "begin", "go on", "go on", "go on", "break off"]):
            case "call":
                call_pool(draw, draw.choice(sides), numbers)
            case "begin" if len(movings) < 4:
                source, target = draw.sample(sides, 2)
                with suppress(InvalidBlockError, UnknownSequenceError, FrozenSequenceError):
                    movings.append(Moving(source, target, *choose_subject(draw, source)))
            case "go on" if movings:
                moving = draw.choice(movings)
                try:
                    moving.go_on()
                    if not moving.steps:
                        movings.remove(moving)
                except (OutOfBlocksError, InvalidArgumentError):
                    movings.remove(moving)
                    moving.break_off()
            case "break off" if movings:
                moving = movings.pop(draw.randrange(len(movings)))
                moving.break_off()
        for side in sides:
            check(side.pool)
            compare(side)
    for moving in movings:
        moving.break_off()
    for side in sides:
        check(side.pool)
        compare(side)
        assert not side.list_frozen()
