import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
from drawing import state
from integrations.made_sequence import MadeSequence

from kv_pool import BlockHasher, InvalidArgumentError, InvalidBlockError, OutOfBlocksError
from kv_pool.core import invariants
from kv_pool.integrations.nano_vllm import Admission, BlockManager

DATA = Path(__file__).parent / "data"
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


# ---- the caller's mistakes -----------------------------------------------------------------------


def refuses(message, call, seq, *arguments, error=InvalidArgumentError):
    """The call raises and leaves pool and sequence as they were."""
    pool = call.__self__.block_pool
    before = (state(pool), list(seq.block_table), seq.num_cached_tokens)
    with pytest.raises(error, match=message):
        call(seq, *arguments)
    assert (state(pool), list(seq.block_table), seq.num_cached_tokens) == before
    invariants.check(pool)


@pytest.mark.parametrize("call", ["can_append", "may_append", "hash_blocks", "deallocate"])
def test_sequence_without_blocks_is_refused(call, eager):
    manager = make_manager()
    seq = start(manager, range(6), eager)
    freed, copy = start(manager, range(6), eager), MadeSequence(range(6))
    manager.deallocate(freed)
    copy.block_table = list(seq.block_table)
    for other in (MadeSequence(range(6)), freed, copy):
        refuses(r"sequence 0 has no blocks: .* call allocate\(\) first", getattr(manager, call), other)


def test_second_allocation_is_refused(eager):
    manager = make_manager()
    seq = start(manager, range(6), eager)
    message = r"already holds blocks, 2 in its table; deallocate\(\) it first"
    refuses(message, manager.allocate, seq)
    refuses(message, manager.allocate, seq, 0)
    seq.block_table.clear()
    refuses("already holds blocks, 0 in its table", manager.allocate, seq)


def test_sequences_that_do_not_fit_are_refused(eager):
    manager = make_manager(3)
    manager.deallocate(start(manager, range(8), eager))
    running = start(manager, range(50, 54), eager)
    for tokens, num_hits, message in (
        (range(9), 2, "needs 3 free blocks, 2 are free of 3"),  # free hits count
        (range(70, 82), 0, "needs 3 free blocks, 2 are free of 3"),
    ):
        arguments = [] if eager else [num_hits]
        refuses(message, manager.allocate, MadeSequence(tokens), *arguments, error=OutOfBlocksError)
    start(manager, range(90, 98), eager)
    running.append_token(4)
    assert not manager.can_append(running)
    refuses("asked for 1 blocks, 0 are free", manager.may_append, running, error=OutOfBlocksError)


@pytest.mark.parametrize("num_cached_blocks", [2, -1, Admission(-1, has_room=False)])
def test_missing_hits_are_refused(num_cached_blocks):
    manager = make_manager()
    start(manager, range(4))
    message = rf"has \d cached blocks, not {int(num_cached_blocks)}; call can_allocate\(\) again"
    refuses(message, manager.allocate, MadeSequence(range(10)), num_cached_blocks)


def test_blocks_changed_outside_the_manager_are_refused():
    manager = make_manager()
    seq = start(manager, range(6))
    seq.block_table.append(7)
    message = r"\(3 blocks\) is not the one that this manager wrote \(2 blocks\)"
    refuses(message, manager.deallocate, seq, error=InvalidBlockError)
    seq.block_table.pop()
    manager.block_pool.free_blocks([manager.block_pool.blocks[2]])
    refuses("block 2 is free", manager.deallocate, seq, error=InvalidBlockError)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(6, 2), (4, 1)])
def test_computed_tokens_without_a_token_or_block_are_refused(num_tokens, num_blocks):
    manager = make_manager()
    seq = start(manager, range(num_tokens))
    if num_tokens == 4:
        seq.append_token(4)
    seq.num_scheduled_tokens = 1
    message = f"would have {num_tokens + 1} computed tokens after this step, but has {len(seq)} tokens and "
    refuses(f"{message}{num_blocks} blocks of 4", manager.hash_blocks, seq)


def test_other_block_size_is_refused():
    manager = make_manager()
    message = "has 10 tokens in 1 blocks, but with block size 4 it would have 3; set Sequence.block_size"
    for call in (manager.can_allocate, manager.allocate):
        refuses(message, call, MadeSequence(range(10), block_size=256))
    refuses("has 0 tokens", manager.allocate, MadeSequence([]))


def test_invalid_manager_arguments_are_refused():
    with pytest.raises(InvalidArgumentError, match="num_blocks is 0; it is a count, 1 or more"):
        BlockManager(0, 4)
    with pytest.raises(InvalidArgumentError, match="block_size is 0"):
        BlockManager(8, 0)
    with pytest.raises(InvalidArgumentError, match=r"the hasher covers 4 tokens .* block_size=16"):
        BlockManager(8, 16, hasher=HASHER)


# ---- nano-vllm's own scheduler -------------------------------------------------------------------


@pytest.mark.parametrize("year", [2025, 2026])
def test_recorded_calls_get_the_recorded_answers(year):
    """Same admissions, cached tokens and block ids, call by call; recipe: tests/integrations/data/."""
    record = json.loads(gzip.decompress((DATA / f"nano_vllm_{year}.json.gz").read_bytes()))
    seen = Counter()
    for run in record["runs"]:
        manager, admitted = BlockManager(run["num_blocks"], run["block_size"]), set()
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
            seen[name] += 1
            if name == "allocate":
                seen["again"] += which in admitted
                admitted.add(which)
            seen["hit"] += name == "allocate" and after[0] > 0
            seen["refused"] += name == "can_allocate" and answer in (-1, False)
            seen["chunk"] += name == "hash_blocks" and num_cached_tokens + num_scheduled_tokens < num_tokens
            if number % 20 == 0:
                invariants.check(manager.block_pool)
        invariants.check(manager.block_pool)
    assert sum(seen.values()) > 10_000
    assert min(seen["hit"], seen["again"], seen["refused"]) > 100
    assert (seen["chunk"] > 10) == (year == 2026)
