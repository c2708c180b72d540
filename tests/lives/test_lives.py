"""Random companions together, on one pool, over real bytes: see `life.py`."""

from collections import Counter

import pytest
from lives.life import KINDS, live

WANTED = {
    *(
        "hit",
        "from tiers",
        "forked",
        "copied on write",
        "loaded",
        "written after an abort",
        "moved",
        "reused",
    ),
    *("present", "broken off", "reset", "gather", "pack", "run", "shrink", "grow", "defragment"),
    *(("migrated", f"{what}Subject") for what in ("Sequence", "Prefix", "Blocks")),
    *(("expired", "READ"), ("expired", "WRITE")),
    *("in doubt", "deliver_late", "release_held", ("lost", True), ("closed", True)),
    *("refused", "set", "change", "session", "end", "abort_before_step", "refuse_leaving"),
    *(("closed", way, is_done) for way in ("OUT", "IN", "TIERS") for is_done in (True, False)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"seed{seed}")
def test_every_byte_reference_and_hold_is_consistent(tmp_path, kind, seed):
    assert live(kind, seed, 600, tmp_path).num_steps == 600


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_long_lives_reach_every_operation(tmp_path, kind):
    happened = Counter()
    for seed in range(100, 105):
        happened += live(kind, seed, 3000, tmp_path / str(seed)).world.tally
    assert not WANTED - happened.keys()
