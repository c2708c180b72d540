import gzip
import json
from pathlib import Path

import pytest
from drawing import state
from integrations.made_sequence import MadeSequence

from kv_pool import BlockHasher, InvalidArgumentError, InvalidBlockError, OutOfBlocksError
from kv_pool.core import invariants
from kv_pool.integrations.nano_vllm import Admission, BlockManager

RECORDS = sorted((Path(__file__).parent / "data").glob("nano_vllm_*.json.gz"))

HASHER = BlockHasher("sha256", "s", 4)


def make_manager(num_blocks=8):
    return BlockManager(num_blocks, 4, hasher=HASHER)


def start(manager, token_ids, eager=False):
    """Admit a new sequence: `eager` as in 2025, else as today, and then compute all of it."""
    seq = MadeSequence(token_ids)
    if eager:
        manager.allocate(seq)
        return seq
    manager.allocate(seq, manager.can_allocate(seq))
    compute(manager, seq, len(seq) - seq.num_cached_tokens)
    return seq


def compute(manager, seq, num_tokens):
    """The end of a step of today's scheduler."""
    seq.num_scheduled_tokens = num_tokens
    manager.hash_blocks(seq)
    seq.num_cached_tokens += num_tokens
    seq.num_scheduled_tokens = 0


@pytest.fixture(params=[False, True], ids=["today", "2025"])
def eager(request):
    return request.param


# ---- admission -----------------------------------------------------------------------------------


def test_can_allocate_answers_both_schedulers():
    manager = make_manager(2)
    fits = manager.can_allocate(MadeSequence(range(8)))
    assert fits == 0
    assert bool(fits)
    too_long = manager.can_allocate(MadeSequence(range(9)))
    assert too_long == -1
    assert not too_long


def test_cost_of_a_cached_block_in_use_differs_by_scheduler():
    manager = make_manager(3)
    start(manager, range(4))
    start(manager, range(50, 54))
    answer = manager.can_allocate(MadeSequence(range(6)))
    assert answer == 1
    assert not answer
    assert answer * manager.block_size == 4


def test_allocate_accepts_fewer_hits_than_available():
    manager = make_manager()
    start(manager, range(10))
    seq = MadeSequence(range(10))
    manager.allocate(seq, 0)
    assert (seq.block_table, seq.num_cached_tokens) == ([3, 4, 5], 0)


# ---- what is cached, and when --------------------------------------------------------------------


# ---- the caller's mistakes -----------------------------------------------------------------------


def refuses(manager, error, message, call, *arguments):
    """The call raises and leaves pool and sequence as they were."""
    seq = arguments[0]
    before = (state(manager.block_pool), list(seq.block_table), seq.num_cached_tokens)
    with pytest.raises(error, match=message):
        call(*arguments)
    assert (state(manager.block_pool), list(seq.block_table), seq.num_cached_tokens) == before
    invariants.check(manager.block_pool)


def test_double_free_is_refused(eager):
    manager = make_manager()
    seq = start(manager, range(6), eager)
    manager.deallocate(seq)
    refuses(manager, InvalidArgumentError, "has no blocks: .* already deallocated", manager.deallocate, seq)


@pytest.mark.parametrize("call", ["can_append", "may_append", "hash_blocks", "deallocate"])
def test_sequence_without_blocks_is_refused(call):
    manager = make_manager()
    message = r"sequence 0 has no blocks: .* call allocate\(\) first"
    refuses(manager, InvalidArgumentError, message, getattr(manager, call), MadeSequence(range(6)))


def test_copy_of_a_sequence_has_no_blocks():
    manager = make_manager()
    seq = start(manager, range(6))
    copy = MadeSequence(range(6))
    copy.block_table = list(seq.block_table)
    refuses(manager, InvalidArgumentError, "has no blocks: ", manager.deallocate, copy)


def test_second_allocation_is_refused(eager):
    manager = make_manager()
    seq = start(manager, range(6), eager)
    message = r"already holds blocks, 2 in its table; deallocate\(\) it first"
    refuses(manager, InvalidArgumentError, message, manager.allocate, seq)
    refuses(manager, InvalidArgumentError, message, manager.allocate, seq, 0)
    seq.block_table.clear()
    refuses(manager, InvalidArgumentError, "already holds blocks, 0 in its table", manager.allocate, seq)


def test_sequence_that_does_not_fit_is_refused(eager):
    manager = make_manager(3)
    start(manager, range(6), eager)
    message = "needs 2 free blocks, 1 are free of 3"
    arguments = [] if eager else [0]
    refuses(manager, OutOfBlocksError, message, manager.allocate, MadeSequence(range(50, 56)), *arguments)


def test_free_hits_count_as_needed_blocks(eager):
    manager = make_manager(3)
    manager.deallocate(start(manager, range(8), eager))
    start(manager, range(50, 54), eager)
    arguments = [] if eager else [1]
    refuses(manager, OutOfBlocksError, "needs 3", manager.allocate, MadeSequence(range(9)), *arguments)


def test_unappendable_block_is_refused(eager):
    manager = make_manager(1)
    seq = start(manager, range(4), eager)
    seq.append_token(4)
    assert not manager.can_append(seq)
    refuses(manager, OutOfBlocksError, "asked for 1 blocks, 0 are free", manager.may_append, seq)


@pytest.mark.parametrize("num_cached_blocks", [2, -1, Admission(-1, has_room=False)])
def test_missing_hits_are_refused(num_cached_blocks):
    manager = make_manager()
    start(manager, range(4))
    message = rf"has \d cached blocks, not {int(num_cached_blocks)}; call can_allocate\(\) again"
    refuses(
        manager,
        InvalidArgumentError,
        message,
        manager.allocate,
        MadeSequence(range(10)),
        num_cached_blocks,
    )


def test_foreign_table_is_refused():
    manager = make_manager()
    seq = start(manager, range(6))
    seq.block_table.append(7)
    refuses(
        manager,
        InvalidBlockError,
        r"\(3 blocks\) is not the one that this manager wrote \(2 blocks\)",
        manager.deallocate,
        seq,
    )


def test_blocks_freed_through_the_pool_are_refused():
    manager = make_manager()
    seq = start(manager, range(6))
    manager.block_pool.free_blocks([manager.block_pool.blocks[2]])
    refuses(manager, InvalidBlockError, "block 2 is free", manager.deallocate, seq)


def test_too_many_computed_tokens_are_refused():
    manager = make_manager()
    seq = start(manager, range(6))
    seq.num_scheduled_tokens = 1
    message = "would have 7 computed tokens after this step, but has 6 tokens and 2 blocks of 4"
    refuses(manager, InvalidArgumentError, message, manager.hash_blocks, seq)


def test_computed_tokens_without_a_block_are_refused():
    manager = make_manager()
    seq = start(manager, range(4))
    seq.append_token(4)
    seq.num_scheduled_tokens = 1
    message = "would have 5 computed tokens after this step, but has 5 tokens and 1 blocks of 4"
    refuses(manager, InvalidArgumentError, message, manager.hash_blocks, seq)


def test_other_block_size_is_refused():
    manager = make_manager()
    message = "has 10 tokens in 1 blocks, but with block size 4 it would have 3; set Sequence.block_size"
    for call in (manager.can_allocate, manager.allocate):
        refuses(manager, InvalidArgumentError, message, call, MadeSequence(range(10), block_size=256))


def test_empty_sequence_is_refused():
    manager = make_manager()
    refuses(manager, InvalidArgumentError, "has 0 tokens", manager.allocate, MadeSequence([]))


def test_invalid_manager_arguments_are_refused():
    with pytest.raises(InvalidArgumentError, match="num_blocks is 0; it is a count, 1 or more"):
        BlockManager(0, 4)
    with pytest.raises(InvalidArgumentError, match="block_size is 0"):
        BlockManager(8, 0)
    with pytest.raises(InvalidArgumentError, match=r"the hasher covers 4 tokens .* block_size=16"):
        BlockManager(8, 16, hasher=HASHER)


# ---- nano-vllm's own scheduler -------------------------------------------------------------------


def read_record(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def test_records_of_both_schedulers_exist():
    assert [path.name for path in RECORDS] == ["nano_vllm_2025.json.gz", "nano_vllm_2026.json.gz"]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_records_contain_the_cases_they_cover(path):
    counted = read_record(path)["counted"]
    assert counted["calls"] > 10_000
    for name in ("admissions_with_hits", "admissions_after_preemption", "refused"):
        assert counted[name] > 100, name
    assert (counted["chunked_prefills"] > 100) == ("2026" in path.name)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_recorded_calls_get_the_recorded_answers(path):
    """Same admissions, cached tokens and block ids, call by call; recipe: tests/integrations/data/."""
    for run in read_record(path)["runs"]:
        manager = BlockManager(run["num_blocks"], run["block_size"])
        seqs = [MadeSequence(tokens, run["block_size"]) for tokens in run["sequences"]]
        for number, (name, before, answer, after) in enumerate(run["calls"]):
            which, num_tokens, num_cached_tokens, num_scheduled_tokens, *arguments = before
            seq = seqs[which]
            seq.num_tokens = num_tokens
            seq.num_cached_tokens = num_cached_tokens
            seq.num_scheduled_tokens = num_scheduled_tokens
            num_held = len(seq.block_table)
            found = getattr(manager, name)(seq, *arguments)
            if isinstance(answer, bool):  # the scheduler of 2025 reads no more of it
                found = bool(found)
            assert found == answer, (number, name)
            grown = seq.block_table[num_held:]
            assert [seq.num_cached_tokens, len(seq.block_table), grown] == after, (number, name)
            if number % 20 == 0:
                invariants.check(manager.block_pool)
        invariants.check(manager.block_pool)
