"""The article on vLLM 0.6's block space manager: groups of sequences that wait, run and are swapped.

In the article's order: blocks for tokens, admission, appends, swap, watermark, the three results. The bytes
are real: a block contains its tokens, and a sequence swapped in from the host has to find them.
"""

import itertools
import math
import random
from functools import partial

import numpy as np
import pytest
from documents.made_examples import load_example

from kv_pool import AllocStatus, BlockMove, InvalidArgumentError, OutOfBlocksError
from kv_pool.core import invariants
from kv_pool.storage import KVStorage

EXAMPLE = load_example("block_space_manager")
BlockSpaceManager = EXAMPLE.BlockSpaceManager
BLOCK_SIZE = 4


class Sequence:
    def __init__(self, seq_id, token_ids):
        self.seq_id = seq_id
        self.token_ids = list(token_ids)

    def get_token_ids(self):
        return self.token_ids


class Group:
    def __init__(self, *seqs):
        self.seqs = list(seqs)

    def get_seqs(self):
        return self.seqs


class Engine:
    """A manager, and the bytes of device and host: the token in each slot."""

    def __init__(self, num_gpu_blocks, num_cpu_blocks, watermark=0.0):
        self.manager = BlockSpaceManager(BLOCK_SIZE, num_gpu_blocks, num_cpu_blocks, watermark)
        self.gpu = KVStorage.allocate(max(1, num_gpu_blocks), BLOCK_SIZE, 1, 1, 1, dtype="float32")
        self.cpu = KVStorage.allocate(max(1, num_cpu_blocks), BLOCK_SIZE, 1, 1, 1, dtype="float32")

    def slots(self, seq):
        table = self.manager.get_block_table(seq)
        return [
            table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(len(seq.get_token_ids()))
        ]

    def compute(self, seq, first=0):
        tokens = np.array(seq.token_ids[first:], np.float32)[:, None, None]
        self.gpu.write(0, self.slots(seq)[first:], tokens, tokens)

    def read(self, seq):
        return self.gpu.read(0, self.slots(seq))[0].ravel().astype(int).tolist()

    def prefill(self, group):
        self.manager.allocate(group)
        self.compute(group.get_seqs()[0])

    def decode(self, seq, *token_ids):
        first = len(seq.token_ids)
        seq.token_ids += token_ids
        self.gpu.apply_moves([BlockMove(*pair) for pair in self.manager.append_slots(seq, 0)])
        self.compute(seq, first)

    def swap_out(self, group):
        pairs = self.manager.swap_out(group)
        self.gpu.copy_to(self.cpu, [BlockMove(*pair) for pair in pairs])
        return pairs

    def swap_in(self, group):
        pairs = self.manager.swap_in(group)
        self.cpu.copy_to(self.gpu, [BlockMove(*pair) for pair in pairs])
        return pairs

    def check(self):
        invariants.check(self.manager.manager.block_pool)
        invariants.check(self.manager.swapper.host_pool)


# ---- blocks for tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 2, 4, 7])
def test_counted_blocks_are_those_with_positions(block_size):
    """An append of nothing after a partly filled block touches none, where vLLM's formula says 1."""
    for held, new, lookahead in itertools.product(range(18), range(18), (0, 1, 5)):
        touched = {position // block_size for position in range(held, held + new + lookahead)}
        counted = EXAMPLE.count_blocks_touched_by_append(held, new, lookahead, block_size)
        assert counted == len(touched)
        num_whole = 1 + math.ceil((new + lookahead - block_size + held % block_size) / block_size)
        assert counted == (num_whole if new + lookahead else 0)
        assert EXAMPLE.count_required_blocks(new, lookahead, block_size) == math.ceil(
            (new + lookahead) / block_size
        )


@pytest.mark.parametrize("counts", [(-1, 0, 4), (0, -1, 4), (3, 0, 0)])
def test_invalid_counts_are_refused(counts):
    for count in (EXAMPLE.count_required_blocks, partial(EXAMPLE.count_blocks_touched_by_append, 4)):
        with pytest.raises(InvalidArgumentError):
            count(*counts)


# ---- waiting -> running --------------------------------------------------------------------------


def test_an_admitted_group_shares_its_prompt():
    engine = Engine(num_gpu_blocks=10, num_cpu_blocks=10)
    manager = engine.manager
    first, second, third = (Sequence(n, range(10, 20)) for n in (1, 2, 3))
    group = Group(first, second, third)
    assert manager.can_allocate(group) is AllocStatus.OK
    engine.prefill(group)
    assert manager.get_block_table(first) == manager.get_block_table(third) == [0, 1, 2]
    assert manager.get_num_free_gpu_blocks() == 7
    with pytest.raises(InvalidArgumentError, match="sequence 1 already has blocks"):
        manager.allocate(group)


def test_a_waiting_group_gets_later_or_never():
    manager = Engine(10, 0).manager
    manager.allocate(Group(Sequence(1, range(20))))
    assert manager.can_allocate(Group(Sequence(2, range(20)))) is AllocStatus.OK
    assert manager.can_allocate(Group(Sequence(2, range(21)))) is AllocStatus.LATER
    assert manager.can_allocate(Group(Sequence(2, range(20))), 1) is AllocStatus.LATER
    assert manager.can_allocate(Group(Sequence(2, range(41)))) is AllocStatus.NEVER
    with pytest.raises(OutOfBlocksError, match=r"needs 6 blocks, 5 are free of 10.* returns LATER"):
        manager.allocate(Group(Sequence(2, range(21))))
    assert manager.get_num_free_gpu_blocks() == 5
    with pytest.raises(InvalidArgumentError, match="sequence 2 has no blocks"):
        manager.get_block_table(Sequence(2, []))


def test_a_group_of_different_prompts_is_refused():
    manager = Engine(10, 0).manager
    with pytest.raises(InvalidArgumentError, match=r"have \[4, 5\] tokens; they must share one prompt"):
        manager.can_allocate(Group(Sequence(1, range(4)), Sequence(2, range(5))))


# ---- running -------------------------------------------------------------------------------------


def test_an_append_without_free_blocks_is_refused():
    engine = Engine(3, 0)
    first, second = Sequence(1, range(10, 16)), Sequence(2, range(10, 16))
    group = Group(first, second)
    engine.prefill(group)
    for seq in group.get_seqs():
        seq.token_ids.append(7)
    # One for the copy and one for the block that the other sequence keeps, as in the article.
    assert not engine.manager.can_append_slots(group)
    engine.manager.free(second)
    assert engine.manager.can_append_slots(group)
    engine.manager.append_slots(first)
    first.token_ids += range(8)
    assert not engine.manager.can_append_slots(group)
    with pytest.raises(OutOfBlocksError, match="has 8 new tokens, 1 blocks are free"):
        engine.manager.append_slots(first)
    assert engine.manager.get_block_table(first) == [0, 1]


# ---- running <-> swapped -------------------------------------------------------------------------


def test_a_swap_out_to_a_full_host_is_refused():
    engine = Engine(8, 3)
    first, second = Sequence(1, range(10, 16)), Sequence(2, range(10, 16))
    group = Group(first, second)
    engine.prefill(group)
    assert not engine.manager.can_swap_out(group)
    with pytest.raises(OutOfBlocksError, match="the host has 3 free blocks of 3"):
        engine.swap_out(group)
    assert engine.manager.get_num_free_cpu_blocks() == 3
    assert engine.read(first) == list(range(10, 16))


def test_a_swapped_sequence_can_be_freed_but_not_appended():
    engine = Engine(8, 8)
    seq = Sequence(1, range(10, 16))
    group = Group(seq)
    engine.prefill(group)
    engine.swap_out(group)
    seq.token_ids.append(7)
    with pytest.raises(InvalidArgumentError, match=r"sequence 1 is swapped out; swap_in\(\)"):
        engine.manager.append_slots(seq)
    assert engine.manager.can_append_slots(group)
    assert engine.swap_out(group) == []
    engine.manager.free(seq)
    engine.manager.free(seq)
    assert engine.manager.get_num_free_cpu_blocks() == 8


# ---- the watermark, and the three results --------------------------------------------------------


def test_a_watermark_of_a_tenth_of_1000_blocks_is_100_blocks():
    manager = BlockSpaceManager(16, num_gpu_blocks=1000, num_cpu_blocks=0, watermark=0.1)
    assert manager.watermark_blocks == 100
    manager.allocate(Group(Sequence(1, range(16 * 500))))
    assert manager.can_allocate(Group(Sequence(2, range(16 * 400)))) is AllocStatus.OK
    assert manager.can_allocate(Group(Sequence(2, range(16 * 401)))) is AllocStatus.LATER
    running = Sequence(1, range(16 * 1000))
    assert manager.can_append_slots(Group(running))  # running sequences may go below it


def test_a_group_alone_may_ignore_the_watermark():
    """In the article the watermark always stays free: a group that needs more than 900 of 1,000 blocks would
    wait for ever. Here it applies only while other sequences hold blocks.
    """
    manager = BlockSpaceManager(16, 1000, 0, watermark=0.1)
    large = Group(Sequence(1, range(16 * 950)))
    assert manager.can_allocate(large) is AllocStatus.OK
    small = Sequence(2, range(16))
    manager.allocate(Group(small))
    assert manager.can_allocate(large) is AllocStatus.LATER


def test_swap_in_needs_next_tokens_and_the_watermark():
    engine = Engine(10, 20, watermark=0.2)
    manager = engine.manager
    first, second = Sequence(1, range(8)), Sequence(2, range(8))
    group = Group(first, second)
    engine.prefill(group)
    engine.swap_out(group)
    other = Sequence(3, range(16))
    engine.prefill(Group(other))
    assert manager.can_swap_in(group, 0) is AllocStatus.OK  # 4 of 6, and 2 stay free
    first.token_ids.append(7)
    assert manager.can_swap_in(group, 0) is AllocStatus.LATER
    manager.free(other)
    assert manager.can_swap_in(group, 0) is AllocStatus.OK
    assert manager.can_swap_in(group, 11) is AllocStatus.OK  # (9 + 11) / 4 and (8 + 11) / 4: all 10 blocks
    assert manager.can_swap_in(group, 12) is AllocStatus.NEVER
    engine.prefill(Group(Sequence(4, range(24))))
    with pytest.raises(
        OutOfBlocksError, match=r"4 blocks are free of 10, 2 .* can_swap_in\(\) returns LATER"
    ):
        engine.swap_in(group)
    assert manager.get_num_free_cpu_blocks() == 16


# ---- everything with a scheduler -----------------------------------------------------------------


class Scheduler:
    """A first-come-first-served scheduler; swaps out the newest group, or recomputes it."""

    def __init__(self, engine, groups, rng):
        self.engine = engine
        self.waiting, self.running, self.swapped = groups, [], []
        self.rng = rng
        self.num_swaps = self.num_recomputed = 0

    def step(self, max_tokens):
        manager = self.engine.manager
        for group in list(self.running):
            if group in self.running:
                self.decode(group, max_tokens)
        while self.swapped and manager.can_swap_in(self.swapped[0], 4) is AllocStatus.OK:
            group = self.swapped.pop(0)
            self.engine.swap_in(group)
            assert all(self.engine.read(seq) == seq.token_ids for seq in group.get_seqs())
            self.running.append(group)
        while self.waiting and not self.swapped and manager.can_allocate(self.waiting[0]) is AllocStatus.OK:
            self.running.append(self.waiting.pop(0))
            self.engine.prefill(self.running[-1])

    def decode(self, group, max_tokens):
        manager = self.engine.manager
        while not manager.can_append_slots(group, num_lookahead_slots=1):
            victim = self.running.pop()
            self.preempt(victim)
            if victim is group:
                return
        for seq in group.get_seqs():
            self.engine.decode(seq, self.rng.randrange(1000))
        for seq in group.get_seqs():
            assert self.engine.read(seq) == seq.token_ids
        if len(group.get_seqs()[0].token_ids) == max_tokens:
            for seq in group.get_seqs():
                manager.free(seq)
            self.running.remove(group)

    def preempt(self, group):
        if self.engine.manager.can_swap_out(group):
            self.engine.swap_out(group)
            self.swapped.append(group)
            self.num_swaps += 1
            return
        for seq in group.get_seqs():
            self.engine.manager.free(seq)
        group.seqs = group.seqs[:1]  # a group of several sequences has no one prompt any more
        self.waiting.insert(0, group)
        self.num_recomputed += 1


@pytest.mark.parametrize("seed", range(3))
def test_scheduled_and_swapped_groups_keep_their_bytes(seed):
    rng = random.Random(seed)
    engine = Engine(24, 20, watermark=0.05)
    groups = []
    for number in range(12):
        prompt = [100 * number + n for n in range(rng.randrange(3, 30))]
        groups.append(Group(*(Sequence(10 * number + n, prompt) for n in range(rng.randrange(1, 3)))))
    scheduler = Scheduler(engine, list(groups), rng)
    for _ in range(1_000):
        scheduler.step(max_tokens=40)
        engine.check()
        if not (scheduler.waiting or scheduler.running or scheduler.swapped):
            break
    assert {len(seq.token_ids) for group in groups for seq in group.get_seqs()} == {40}
    assert scheduler.num_swaps > 0
    assert scheduler.num_recomputed > 0
    assert engine.manager.get_num_free_gpu_blocks() == 24
    assert engine.manager.get_num_free_cpu_blocks() == 20
