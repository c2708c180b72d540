"""Random schedules through vLLM 0.33's `KVCacheManager` and ours: after every call the same state.

Compared are hits (tokens, and blocks of each group), refusals, new blocks of each group, block tables, the
whole free queue in order, the prefix map, and events. Each result of our `can_allocate` is also compared with
the call that follows. Runs if vLLM's core can be imported (marker `vllm`).

Known differences, which the schedules avoid:

- A window of 1 token: vLLM caches none of its blocks, so no prefix of the model is ever hit. kv_pool hits it.
- Full attention with blocks larger than the hashes': vLLM caches the end of a prompt within a block under one
  more key when the block is full. Groups without Mamba do not look it up: it is excluded from the comparison
  of the maps and of events.
- `evict_blocks` of a block in use: vLLM caches it again at the next step if it is such an end, and, with
  Mamba, the last state of a prompt. In kv_pool it stays evicted. The schedules evict free blocks only then.
- `full_sequence_must_fit` with Mamba: vLLM counts one block of state; kv_pool counts the two that a step
  needs which begins a block: one to read and one to write.
- Local attention in chunks that are not a multiple of blocks: vLLM uses the chunk of the longest possible hit
  for the actual hit, and hits prefixes with missing blocks. With blocks of 2, chunks of 11 and a limit of 11
  tokens it finds 10 without a block, although the next token attends to all of them. In kv_pool this is no
  hit. If a load ends in such a block, vLLM counts it as a new block, kv_pool as a loaded one.
"""

import pytest
from core.plain_operations import agree, find_differences, run
from manager.manager_schedule import KINDS, ManagerSchedule

pytestmark = pytest.mark.vllm

NUM_STEPS = 150
SEEDS_PER_TEST = 25


def find_disagreement(kind, seed, has_rules):
    """Return the first call on which the two disagree, and the difference; None if they agree."""
    from manager.own_manager import OwnManagerSide
    from manager.vllm_manager import VllmManagerSide

    schedule = ManagerSchedule(kind, seed, has_rules)
    theirs, ours = VllmManagerSide(None, schedule.options), OwnManagerSide(None, schedule.options)
    for operation, answers in run(schedule, theirs, ours, num_steps=NUM_STEPS):
        if not agree(*answers):
            return [str(schedule.options), f"{operation}: theirs {answers[0]}, ours {answers[1]}"]
        their_picture, our_picture = theirs.picture(), ours.picture()
        if their_picture != our_picture:
            differences = find_differences(their_picture, our_picture)
            return [str(schedule.options), f"after {operation}", *differences]
    return None


def compare(kind, first_seed, has_rules=False):
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        disagreement = find_disagreement(kind, seed, has_rules)
        if disagreement:
            pytest.fail("\n".join([f"seed {seed}", *disagreement]))


@pytest.mark.parametrize("first_seed", range(0, 300, SEEDS_PER_TEST))
@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_agree_with_vllm(kind, first_seed):
    compare(kind, first_seed)


@pytest.mark.parametrize("first_seed", range(0, 300, SEEDS_PER_TEST))
@pytest.mark.parametrize("kind", KINDS)
def test_rules_agree_with_vllm(kind, first_seed):
    compare(kind, first_seed, has_rules=True)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(1000, 1500, SEEDS_PER_TEST))
@pytest.mark.parametrize("kind", KINDS)
def test_more_random_schedules_agree_with_vllm(kind, first_seed):
    compare(kind, first_seed)
