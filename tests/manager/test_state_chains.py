"""`StateChains`: the states that a conversation has left behind."""

import random
from dataclasses import dataclass, field

import pytest

from kv_pool.core.block import KVCacheBlock
from kv_pool.manager.block_groups.state_chains import StateChains


def cache(block_id, key):
    return KVCacheBlock(block_id, _block_hash=key)


def take_released(chains):
    """Return the block to release, if any, and note that it was released."""
    released = [state.block for state in chains.superseded if state.is_cached]
    chains.superseded.clear()
    assert len(released) <= 1
    for block in released:
        block.key = None
    return released[0] if released else None


@dataclass
class Kept:
    """A state as the slow model sees it: never forgotten."""

    block: KVCacheBlock
    key: bytes
    source: "Kept | None"
    is_end: bool
    resumes: list[int] = field(default_factory=list)
    has_later_end: bool = False
    is_released: bool = False


@pytest.mark.parametrize("seed", range(30))
def test_releases_equal_a_model_that_forgets_nothing(seed):
    rng = random.Random(seed)
    chains = StateChains()
    blocks = [cache(number, None) for number in range(12)]
    history: list[Kept] = []
    for turn in range(300):
        # The newest state of a block is the one that it holds, unless its key was lost since.
        held = {id(kept.block): kept for kept in history}
        alive = [kept for kept in held.values() if kept.block.key == kept.key and not kept.is_released]
        source = rng.choice(alive) if alive and rng.random() < 0.8 else None
        resumed = None
        if source is not None:
            source.resumes.append(turn)
            resumed = chains.note_resumed(source.block)
            assert resumed is not None
        free = [block for block in blocks if source is None or block is not source.block]
        block = rng.choice(free)
        key = block.key = turn.to_bytes(2)
        is_end = rng.random() < 0.8
        expected = None
        if source is not None and is_end:
            old = source.source
            is_first = not source.has_later_end
            source.has_later_end = True
            if is_first and old is not None and old.is_end and len(old.resumes) == 1 and not old.is_released:
                expected = old.block if old.block.key == old.key else None
                old.is_released = expected is not None
        chains.note_kept(block, resumed, is_end)
        assert take_released(chains) is expected
        history.append(Kept(block, key, source, is_end))
        if rng.random() < 0.1:
            rng.choice(blocks).key = None  # evicted
        assert len(chains) <= len(blocks)
