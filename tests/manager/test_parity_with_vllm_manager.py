"""Random schedules through vLLM 0.33's `KVCacheManager` and ours: after every call the same state.

Compared are hits (tokens, and blocks of each group), refusals, new blocks of each group, block tables, the
whole free queue in order, the prefix map, and events. And what our `can_allocate` says must come true, call
by call. Runs where vLLM's core imports (marker `vllm`).

Where they differ, so that the schedules stay clear of it:

- A window of 1 token: vLLM caches none of its blocks, so that no prefix of the model is ever hit. Here it is.
- Full attention whose blocks are larger than the hashes': vLLM caches the end of a prompt in mid-block under
  one more key, when the block is full. Groups without Mamba do not look for it: it is left out of the
  comparison of the maps and, with it, events.
- `evict_blocks` of a block in use: vLLM caches it anew at the next step if it is such an end, and, with
  Mamba, the last state of a prompt. Here it stays evicted. The schedules evict free blocks only there.
- `full_sequence_must_fit` with Mamba: vLLM counts one block of state, here it is the two that a step which
  begins a block needs, the one it reads and the one it writes.
- Local attention in chunks that are no multiple of blocks: vLLM takes the chunk of the longest possible hit
  for that of the hit, and hits prefixes of which blocks are missing. With blocks of 2, chunks of 11 and a
  limit of 11 tokens it finds 10 without a block, though the next token attends to all of them. Here such a
  prefix is no hit. Where a load ends in such a block, it counts as a new one there, as a loaded one here.
"""

import pytest
from core.plain_operations import agree, find_differences, run
from manager.manager_schedule import KINDS, ManagerSchedule

pytestmark = pytest.mark.vllm

NUM_STEPS = 150
SEEDS_PER_TEST = 25


def find_disagreement(kind, seed):
    """What the first call that they disagree on is, and how; None if they agree on all."""
    from manager.own_manager import OwnManagerSide
    from manager.vllm_manager import VllmManagerSide

    schedule = ManagerSchedule(kind, seed)
    theirs, ours = VllmManagerSide(None, schedule.options), OwnManagerSide(None, schedule.options)
    for operation, answers in run(schedule, theirs, ours, num_steps=NUM_STEPS):
        if not agree(*answers):
            return [str(schedule.options), f"{operation}: theirs {answers[0]}, ours {answers[1]}"]
        their_picture, our_picture = theirs.picture(), ours.picture()
        if their_picture != our_picture:
            differences = find_differences(their_picture, our_picture)
            return [str(schedule.options), f"after {operation}", *differences]
    return None


def compare(kind, first_seed):
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        disagreement = find_disagreement(kind, seed)
        if disagreement:
            pytest.fail("\n".join([f"seed {seed}", *disagreement]))


@pytest.mark.parametrize("first_seed", range(0, 300, SEEDS_PER_TEST))
@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_agree_with_vllm(kind, first_seed):
    compare(kind, first_seed)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(1000, 1500, SEEDS_PER_TEST))
@pytest.mark.parametrize("kind", KINDS)
def test_more_random_schedules_agree_with_vllm(kind, first_seed):
    compare(kind, first_seed)
