"""Replay recorded random operations of vLLM on kv_pool's classes: parity checks without vLLM.

The recordings, one per release, and their recipe are in tests/core/data/. `test_parity_with_vllm.py` runs
vLLM itself.
"""

import json
import lzma
from pathlib import Path
from types import SimpleNamespace

import pytest
from core.plain_operations import agree, digest, find_differences
from core.pool_operations import PoolSide

import kv_pool
from kv_pool.core.kv_events import KVCacheEvent, KVEventTypes
from kv_pool.integrations.vllm.releases import PartialBlocksOnly


def read_recording(release):
    path = Path(__file__).parent / "data" / f"parity_with_vllm_{release.replace('.', '_')}.jsonl.xz"
    with lzma.open(path, "rt") as recording:
        provenance, *runs = [json.loads(line) for line in recording]
    assert provenance["vllm"].startswith(release)
    return [run for run in runs if run["subject"] == "pool"]


RELEASES = ("0.30", "0.31", "0.32", "0.33")
RUNS = {name: read_recording(name) for name in RELEASES}


class LastFeatureOnly(PartialBlocksOnly):
    last_feature_only = True


# kv_pool's pools for the releases whose results differ from those of 0.33.
POOLS = {"0.31": PartialBlocksOnly, "0.30": LastFeatureOnly}


class BlockStored(KVCacheEvent):
    """The event until 0.32, without `lookahead_token_ids`: one field fewer has another header in msgpack."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


def make_older_stored(*, lookahead_token_ids, **fields):
    assert lookahead_token_ids is None
    return BlockStored(**fields)


def with_older_events(pool_class):
    """Return a subclass whose events have the fields of vLLM 0.32."""

    class OlderPool(pool_class):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options, event_types=KVEventTypes(stored=make_older_stored))

    return OlderPool


CLASSES = ("BlockHashToBlockMap", "FreeKVCacheBlockQueue", "KVCacheBlock", "KVCacheMetricsCollector")
NUM_OLDER = 12
"""Runs of each older release that the gate replays; the night replays all."""


def replay(run, classes):
    """Make the recorded calls; raise AssertionError at the first result or picture that differs."""
    side = PoolSide(classes, run["options"])
    recorded = zip(run["operations"], run["answers"], run["digests"], strict=True)
    for step, (operation, answer, expected) in enumerate(recorded):
        where = f"pool seed {run['seed']}, step {step}: {operation}"
        try:
            ours = plain(side.apply(operation))
        except Exception as error:
            raise AssertionError(f"{where}\nvLLM answered {answer}\nwe raise {error!r}") from error
        assert agree(answer, ours), f"{where}\nvLLM answered {answer}\nwe answer     {ours}"
        picture = side.picture()
        if digest(picture) != expected:
            raise AssertionError(f"{where}\nleaves us with another picture than vLLM: {draw(picture)}")
    differences = list(find_differences(run["end"], plain(side.picture())))
    assert not differences, "\n".join(differences)


def replay_all(classes, release):
    for run in RUNS[release]:
        replay(run, classes)


def plain(value):
    return json.loads(json.dumps(value))


def draw(picture):
    return "\n".join(f"{name}: {json.dumps(part)}" for name, part in picture.items())


def with_pool(pool_class, release):
    """Return kv_pool's classes, with this one as `BlockPool`, and with the events of the release."""
    classes = {name: getattr(kv_pool, name) for name in CLASSES}
    if release == "0.33":
        return SimpleNamespace(**classes, BlockPool=pool_class, BlockStored=kv_pool.BlockStored)
    return SimpleNamespace(**classes, BlockPool=with_older_events(pool_class), BlockStored=BlockStored)


@pytest.mark.parametrize(
    ("release", "run"),
    [
        pytest.param(
            release,
            run,
            id=f"{release}-{run['seed']}",
            marks=[pytest.mark.slow] if release != "0.33" and number >= NUM_OLDER else [],
        )
        for release in RELEASES
        for number, run in enumerate(RUNS[release])
    ],
)
def test_recorded_calls_have_the_results_of_vllm(release, run):
    replay(run, with_pool(POOLS.get(release, kv_pool.BlockPool), release))


@pytest.mark.parametrize(
    ("release", "pool_class"), [("0.31", kv_pool.BlockPool), ("0.30", PartialBlocksOnly)]
)
def test_the_pool_of_the_next_release_is_detected(release, pool_class):
    """The older releases differ from the next ones in what the recordings show."""
    with pytest.raises(AssertionError, match="pool seed"):
        replay_all(with_pool(pool_class, release), release)
