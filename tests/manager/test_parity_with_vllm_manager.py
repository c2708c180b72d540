"""Random schedules through vLLM's `KVCacheManager` and ours: after every call the same state.

Compared are hits (tokens, and blocks of each group), junctions, refusals, new blocks of each group, block
tables, copies, the whole free queue in order, the prefix map, and events. Each result of our `can_allocate`
is also compared with the call that follows. Runs if vLLM's core can be imported (marker `vllm`).

With `PrefixRules`, most of the seeds: vLLM's retention intervals 0, N and None, drafters that drop a block or
hash ahead, tokens in flight, states after drafts, in the middle of a step and at the ends of prompts within a
block, and their copies. Without, vLLM's interval None; with vLLM 0.33 only.

Known differences, which the schedules avoid:

- Local attention in chunks that are not a multiple of blocks: vLLM uses the chunk of the longest possible hit
  for the actual hit, and hits prefixes with missing blocks. With blocks of 2, chunks of 11 and a limit of 11
  tokens it finds 10 without a block, although the next token attends to all of them. In kv_pool this is no
  hit.
- A hash that covers 2 or more tokens after its block, with windows or states: vLLM raises IndexError in a
  look-up of a prompt that ends right after a block.
- A drafter with several modules whose groups include the states, and hits within blocks: vLLM caches the
  state after later tokens under the hash of earlier ones, and then fails an assertion. kv_pool does not.
- More drafts than a hash has tokens, with states saved in the middle of a step: vLLM saves a state after
  drafts, and fails an assertion because the hash does not exist yet. kv_pool does not cache it.
- External tokens and states, where the same step also computes tokens of a later block: vLLM counts one block
  too few, and raises ValueError if the pool has no more. kv_pool returns None.

- Until vLLM 0.31, states and tokens in flight: if a prompt ends with a hash, vLLM caches its end again with
  the state after later tokens, and fails an assertion at a block's end.

Without `PrefixRules` also:

- A window of 1 token: vLLM caches none of its blocks, so no prefix of the model is ever hit. kv_pool hits it.
- Full attention with blocks larger than the hashes': vLLM caches the end of a prompt within a block under one
  more key when the block is full. Groups without Mamba do not look it up: it is excluded from the comparison
  of the maps and of events.
- `evict_blocks` of a block in use: vLLM caches it again at the next step if it is such an end, and, with
  Mamba, the last state of a prompt. In kv_pool it stays evicted. The schedules evict free blocks only then.
- `full_sequence_must_fit` with Mamba: vLLM counts one block of state; kv_pool counts the two that a step
  needs which begins a block: one to read and one to write.
"""

import pytest
from core.plain_operations import agree, find_differences, run
from manager.manager_schedule import KINDS, ManagerSchedule
from manager.rule_options import NEWEST

pytestmark = pytest.mark.vllm

NUM_STEPS = 150
SEEDS_PER_TEST = 25


def find_disagreement(kind, seed, has_rules):
    """Return the first call on which the two disagree, and the difference; None if they agree."""
    from manager.own_manager import OwnManagerSide
    from manager.vllm_manager import RELEASE, VllmManagerSide

    schedule = ManagerSchedule(kind, seed, has_rules, RELEASE)
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
    from manager.vllm_manager import RELEASE

    if RELEASE < NEWEST and not has_rules:
        pytest.skip("without rules, kv_pool caches as vLLM 0.33 does")
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        disagreement = find_disagreement(kind, seed, has_rules)
        if disagreement:
            pytest.fail("\n".join([f"seed {seed}", *disagreement]))


@pytest.mark.parametrize("first_seed", range(0, 100, SEEDS_PER_TEST))
@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_agree_with_vllm(kind, first_seed):
    compare(kind, first_seed)


@pytest.mark.parametrize("first_seed", range(0, 200, SEEDS_PER_TEST))
@pytest.mark.parametrize("kind", KINDS)
def test_rules_agree_with_vllm(kind, first_seed):
    compare(kind, first_seed, has_rules=True)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(1000, 1500, SEEDS_PER_TEST))
@pytest.mark.parametrize("has_rules", [False, True], ids=["dense", "rules"])
@pytest.mark.parametrize("kind", KINDS)
def test_more_random_schedules_agree_with_vllm(kind, has_rules, first_seed):
    compare(kind, first_seed, has_rules)
