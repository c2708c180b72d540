"""Random schedules: results agree with a slow model, invariants hold after each step, bytes are read back."""

from collections import Counter

import pytest
from manager.random_scheduler import RandomScheduler, Setup

from kv_pool import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

FULL = FullAttentionSpec(block_size=4)

SETUPS = [
    Setup(name="full attention", groups=(FULL,), num_blocks=24),
    Setup(name="a pool of a request and a half", groups=(FULL,), num_blocks=18, watermark=0.1),
    Setup(name="a pool too small for some", groups=(FULL,), num_blocks=9),
    Setup(name="without caching", groups=(FULL,), num_blocks=24, caching=False),
    Setup(name="blocks in runs", groups=(FULL,), num_blocks=30, runs=True),
    Setup(name="hashes of two tokens", groups=(FULL,), num_blocks=24, hash_block_size=2),
    Setup(name="a window", groups=(SlidingWindowSpec(block_size=4, sliding_window=6),), num_blocks=16),
    Setup(
        name="a window, and a pool too small for some",
        groups=(SlidingWindowSpec(block_size=4, sliding_window=6),),
        num_blocks=6,
    ),
    Setup(
        name="a window of one token",
        groups=(SlidingWindowSpec(block_size=2, sliding_window=1),),
        num_blocks=30,
        hash_block_size=2,
    ),
    Setup(
        name="full and window",
        groups=(FULL, SlidingWindowSpec(block_size=4, sliding_window=9)),
        num_blocks=36,
        watermark=0.05,
    ),
    Setup(
        name="full and window of other block sizes",
        groups=(FullAttentionSpec(block_size=8), SlidingWindowSpec(block_size=4, sliding_window=5)),
        num_blocks=30,
    ),
    Setup(
        name="window in large blocks, full in small ones",
        groups=(SlidingWindowSpec(block_size=8, sliding_window=7), FullAttentionSpec(block_size=2)),
        num_blocks=40,
        hash_block_size=2,
    ),
    Setup(
        name="two windows",
        groups=(
            FULL,
            SlidingWindowSpec(block_size=4, sliding_window=4),
            SlidingWindowSpec(block_size=4, sliding_window=14),
        ),
        num_blocks=44,
    ),
    Setup(
        name="chunks",
        groups=(ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8),),
        num_blocks=16,
    ),
    Setup(
        name="chunks that blocks do not fit into",
        groups=(ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=6), FULL),
        num_blocks=36,
    ),
    Setup(
        name="chunks smaller than blocks",
        groups=(ChunkedLocalAttentionSpec(block_size=8, attention_chunk_size=6), FULL),
        num_blocks=30,
    ),
    Setup(name="states", groups=(MambaSpec(block_size=4),), num_blocks=14),
    Setup(name="full and states", groups=(FULL, MambaSpec(block_size=8)), num_blocks=34),
    Setup(
        name="full, window and states",
        groups=(FULL, SlidingWindowSpec(block_size=4, sliding_window=7), MambaSpec(block_size=4)),
        num_blocks=44,
    ),
    Setup(
        name="full and bounded states",
        groups=(FULL, MambaSpec(block_size=4)),
        num_blocks=40,
        bounded=True,
    ),
    Setup(name="cross attention", groups=(FULL, CrossAttentionSpec(block_size=3)), num_blocks=34),
    Setup(name="encoder only", groups=(EncoderOnlyAttentionSpec(block_size=4), FULL), num_blocks=24),
    Setup(
        name="all at once",
        groups=(
            FullAttentionSpec(block_size=8),
            SlidingWindowSpec(block_size=4, sliding_window=9),
            MambaSpec(block_size=8),
            CrossAttentionSpec(block_size=4),
        ),
        num_blocks=44,
        hash_block_size=2,
        watermark=0.05,
    ),
]

NUM_SLOW_SEEDS = 19
NUM_SLOW_STEPS = 200
NUM_SLOW_IN_ALL = NUM_SLOW_SEEDS * NUM_SLOW_STEPS * len(SETUPS)
EVENTS = (
    *("given", "not given", "preemptions", "refusals", "aborts", "finished", "reset", "cached late"),
    *("forks", "copies", "slots taken early", "external", "loaded", "lookahead"),
)


def run(setup, seeds, num_steps):
    done = Counter()
    for seed in seeds:
        scheduler = RandomScheduler(setup, seed)
        try:
            scheduler.run(num_steps)
        except Exception as error:
            error.add_note(f"{setup.name!r}, seed {seed}, step {scheduler.done['steps']}")
            raise
        done += scheduler.done
    return done


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_a_random_schedule_agrees_with_a_slow_model(setup):
    done = run(setup, range(3), 70)
    assert done["steps"] == 210


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_100_000_steps_agree_with_a_slow_model(setup):
    assert NUM_SLOW_IN_ALL >= 100_000
    done = run(setup, range(100, 100 + NUM_SLOW_SEEDS), NUM_SLOW_STEPS)
    assert done["steps"] == NUM_SLOW_SEEDS * NUM_SLOW_STEPS
    missing = [event for event in EVENTS if not done[event]]
    assert missing == (["external", "loaded"] if setup.bounded else [])
    assert bool(done["hits"]) == setup.caching
    assert bool(done["waits for a state"]) == setup.has_states
    assert bool(done["rejected"]) == (not setup.has_states)
