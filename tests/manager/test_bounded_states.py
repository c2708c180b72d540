"""`PrefixRules(bounded_states=True)`: two states of a request, and the last two turns of a conversation."""

import random
from dataclasses import dataclass

import pytest

from kv_pool import (
    BlockHasher,
    BlockPool,
    BlockRetention,
    FullAttentionSpec,
    KVCacheManager,
    MambaSpec,
    Request,
    RetentionDirective,
)
from kv_pool.core.block_keys import get_group_id
from kv_pool.manager import invariants
from kv_pool.manager.prefix_rules import PrefixRules

BLOCK = 4
HASHER = BlockHasher(block_size=BLOCK)
STATES = 1
"""The group of the states."""


def make_manager(num_blocks=2000, **rules):
    groups = [FullAttentionSpec(block_size=BLOCK), MambaSpec(block_size=BLOCK)]
    prefix_rules = PrefixRules(bounded_states=True, **rules)
    return KVCacheManager(BlockPool(num_blocks, True, BLOCK), groups=groups, prefix_rules=prefix_rules)


def start(manager, request):
    """Admit and compute a prompt, in steps that end where states are cached. Return the tokens hit."""
    prefix = manager.get_computed_blocks(request)
    step_ends = manager.list_step_ends(request, prefix)
    assert len(step_ends) <= 2
    num_tokens = prefix.num_tokens
    for end in [*step_ends, request.num_tokens]:
        if end > num_tokens:
            first = prefix if num_tokens == prefix.num_tokens else None
            assert manager.allocate_slots(request, end - num_tokens, first) is not None
            manager.take_block_copies()
            num_tokens = request.num_computed_tokens = end
    return prefix.num_tokens


def run(manager, name, tokens, num_output=0):
    """Run a request from start to end; return the tokens hit."""
    request = Request(name, tokens, HASHER)
    num_hit = start(manager, request)
    for token in range(num_output):
        request.append_output_token_ids([10_000 + token])
        assert manager.allocate_slots(request, 1) is not None
        manager.take_block_copies()
        request.num_computed_tokens += 1
    manager.free(request)
    return num_hit


def list_states(manager, tokens):
    """Return the numbers of tokens of this sequence after which a state is cached."""
    cached = {
        block.block_hash
        for block in manager.block_pool.blocks
        if block.block_hash is not None and get_group_id(block.block_hash) == STATES
    }
    hashes = Request("probe", tokens, HASHER).block_hashes
    suffix = STATES.to_bytes(4)
    return [(index + 1) * BLOCK for index, one in enumerate(hashes) if one + suffix in cached]


def count_states(manager):
    return sum(
        get_group_id(block.block_hash) == STATES
        for block in manager.block_pool.blocks
        if block.block_hash is not None
    )


def test_a_released_state_is_reused_at_once():
    manager = make_manager()
    tokens = list(range(42))
    run(manager, "turn 0", tokens)
    blocks = manager.block_pool.blocks
    suffix = STATES.to_bytes(4)
    key = Request("probe", tokens, HASHER).block_hashes[9] + suffix
    released = next(block for block in blocks if block.block_hash == key)
    tokens += range(100, 110)
    run(manager, "turn 1", tokens)
    request = Request("turn 2", [*tokens, *range(200, 210)], HASHER)
    start(manager, request)
    assert released.block_hash is None
    assert released.ref_cnt == 1, "the next step of turn 2 takes it"


def test_a_retained_state_is_not_released():
    pool = BlockPool(2000, True, BLOCK)
    groups = [FullAttentionSpec(block_size=BLOCK), MambaSpec(block_size=BLOCK)]
    retention = BlockRetention(pool, clock=lambda: 0.0)
    rules = PrefixRules(bounded_states=True)
    manager = KVCacheManager(pool, groups=groups, prefix_rules=rules, retention=retention)
    tokens = list(range(42))
    retention.set_directives("turn 0", [RetentionDirective(0, 42, priority=80)])
    run(manager, "turn 0", tokens)
    for turn in range(1, 4):
        tokens = [*tokens, *range(100 * turn, 100 * turn + 10)]
        run(manager, f"turn {turn}", tokens)
    assert list_states(manager, tokens) == [20, 40, 60, 68]
    assert retention.num_retained
    invariants.check_manager(manager, [])


@dataclass
class Kept:
    """A state as the slow model sees it."""

    is_end: bool
    source: tuple[int, ...] | None
    num_resumes: int = 0
    has_later_end: bool = False


class SlowStates:
    """The states that the rule keeps, by all tokens before them; one request at a time, nothing evicted."""

    def __init__(self):
        self.states: dict[tuple[int, ...], Kept] = {}
        self.seen: set[tuple[int, ...]] = set()
        self.ends: dict[tuple[int, ...], bool] = {}  # whether a request has continued the end of another

    def run(self, tokens):
        ends = range(BLOCK, len(tokens), BLOCK)
        num_shared = max((end for end in ends if tokens[:end] in self.seen), default=0)
        num_hit = max((end for end in ends if tokens[:end] in self.states and end <= num_shared), default=0)
        end = max(ends, default=0)
        source = tokens[:num_hit] if num_hit else None
        if source is not None:
            self.states[source].num_resumes += 1
        second = 0
        is_next_turn = self.ends.get(tokens[:num_shared]) is False
        if num_shared > num_hit:
            self.ends[tokens[:num_shared]] = True
        if num_shared > num_hit and not is_next_turn:
            second = num_shared
        elif end - num_hit > num_hit:
            second = (num_hit + end) // 2 // BLOCK * BLOCK
        for position in sorted({second, end}):
            if position > num_hit:
                is_end = position == end and position != second
                self.keep(tokens[:position], source, is_end)
        last = tokens[: len(tokens) // BLOCK * BLOCK]
        if last not in self.seen:
            self.ends[last] = False
        self.seen.update(tokens[:position] for position in range(BLOCK, len(tokens) + 1, BLOCK))
        return num_hit

    def keep(self, prefix, source, is_end):
        self.states[prefix] = Kept(is_end, source)
        if not is_end or source is None or self.states[source].has_later_end:
            return
        self.states[source].has_later_end = True
        old = self.states.get(self.states[source].source)
        if old is not None and old.is_end and old.num_resumes == 1:
            del self.states[self.states[source].source]


@pytest.mark.parametrize("seed", range(25))
def test_states_equal_a_slow_model(seed):
    rng = random.Random(seed)
    manager = make_manager(20_000)
    model = SlowStates()
    prompts = [()]
    for number in range(60):
        base = rng.choice(prompts[-8:])
        base = base[: rng.randrange(len(base) + 1)] if rng.random() < 0.4 else base
        tokens = base + tuple(rng.randrange(1_000_000) for _ in range(rng.randrange(1, 40)))
        prompts.append(tokens)
        assert run(manager, f"r{number}", tokens) == model.run(tokens)
        kept = {end for end in range(BLOCK, len(tokens) + 1, BLOCK) if tokens[:end] in model.states}
        assert set(list_states(manager, tokens)) == kept
        assert count_states(manager) == len(model.states)
    invariants.check_manager(manager, [])


@pytest.mark.parametrize("policy", [None, "lru", "s3fifo"])
def test_a_conversation_keeps_few_states_under_each_policy(policy):
    """A policy's number on a block was taken for a retention's, so that no state was released."""
    manager = make_manager()
    if policy is not None:
        manager.block_pool.open_policy(policy)
    for turn in range(1, 10):
        run(manager, f"turn {turn}", range(20 * turn))
        assert count_states(manager) <= 4
