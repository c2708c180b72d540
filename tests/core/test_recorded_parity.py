"""Replay recorded random operations of vLLM on kv_pool's classes: parity checks without vLLM.

The recordings, one per release, and their recipe are in tests/core/data/. `test_parity_with_vllm.py` runs
vLLM itself.
"""

import json
import lzma
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from core.part_operations import PartSide
from core.plain_operations import agree, digest, find_differences, has_raised
from core.pool_operations import PoolSide

import kv_pool
from kv_pool import AllBlocksCleared, BlockHashToBlockMap, FreeKVCacheBlockQueue
from kv_pool.core.kv_events import KVCacheEvent, KVEventTypes
from kv_pool.integrations.vllm.older_behaviour import LastFeatureOnly, PartialBlocksOnly


def read_recording(release):
    path = Path(__file__).parent / "data" / f"parity_with_vllm_{release.replace('.', '_')}.jsonl.xz"
    with lzma.open(path, "rt") as recording:
        return [json.loads(line) for line in recording]


RELEASES = ("0.30", "0.31", "0.32", "0.33")
PROVENANCE, RUNS = {}, {}
for name in RELEASES:
    PROVENANCE[name], *RUNS[name] = read_recording(name)
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


CLASSES = (
    "BlockHashToBlockMap",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "KVCacheMetricsCollector",
)
SIDES = {"pool": PoolSide, "parts": PartSide}

# Every method that vLLM's callers use, and every attribute that they set or edit.
OPERATIONS = {
    "pool": """
        make_pool get_new_blocks touch free_blocks unpin_blocks is_block_writable get_cached_block
        cache_full_blocks cache_partial_block move_block_hashes _insert_block_hash _maybe_evict_cached_block
        evict_blocks reset_prefix_cache get_num_free_blocks get_usage emit_cached_block_events take_events
        append_event add_reference set_num_free_blocks iter_blocks_after get_one_block contain insert_into_map
        pop_from_map take_entry put_entry_back repr_block drain_samples request grow
    """,
    "parts": """
        make_queue popleft popleft_n remove append append_n prepend_n get_all_free_blocks iter_blocks_after
        walk_on set_num_free_blocks cut_link mend_link insert pop get_one_block contain count_keys
        put_foreign_entry drop_entry copy_and_clear put_copy_back make_block set_block_hash reset_hash
        repr_block write
    """,
}


def replay(run, classes):
    """Make the recorded calls; raise AssertionError at the first result or picture that differs."""
    side = SIDES[run["subject"]](classes, run["options"])
    recorded = zip(run["operations"], run["answers"], run["digests"], strict=True)
    for step, (operation, answer, expected) in enumerate(recorded):
        where = f"{run['subject']} seed {run['seed']}, step {step}: {operation}"
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


def replay_all(subject, classes, release="0.33"):
    for run in RUNS[release]:
        if run["subject"] == subject:
            replay(run, classes)


def plain(value):
    return json.loads(json.dumps(value))


def draw(picture):
    return "\n".join(f"{name}: {json.dumps(part)}" for name, part in picture.items())


def with_pool(pool_class, release="0.33"):
    """Return kv_pool's classes, with this one as `BlockPool`, and with the events of the release."""
    classes = {name: getattr(kv_pool, name) for name in CLASSES}
    if release == "0.33":
        return SimpleNamespace(**classes, BlockPool=pool_class, BlockStored=kv_pool.BlockStored)
    return SimpleNamespace(**classes, BlockPool=with_older_events(pool_class), BlockStored=BlockStored)


@pytest.mark.parametrize(
    ("release", "run"),
    [
        pytest.param(release, run, id=f"{release}-{run['subject']}-{run['seed']}")
        for release in RELEASES
        for run in RUNS[release]
    ],
)
def test_recorded_calls_have_the_results_of_vllm(release, run):
    replay(run, with_pool(POOLS.get(release, kv_pool.BlockPool), release))


@pytest.mark.parametrize("release", RELEASES)
def test_each_recording_is_from_its_release_and_long_enough(release):
    assert PROVENANCE[release]["vllm"].startswith(release)
    num_steps = Counter()
    for run in RUNS[release]:
        num_steps[run["subject"]] += len(run["operations"])
        assert len(run["operations"]) == PROVENANCE[release]["num_steps"]
    assert num_steps["pool"] >= (20_000 if release == "0.33" else 10_000)
    assert num_steps["parts"] >= (4_000 if release == "0.33" else 2_000)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("subject", SIDES)
def test_each_recording_has_every_call_and_expected_error(subject, release):
    counts, errors = Counter(), set()
    for run in RUNS[release]:
        if run["subject"] == subject:
            for (name, *_), answer in zip(run["operations"], run["answers"], strict=True):
                counts[name] += 1
                if has_raised(answer):
                    errors.update((name, family) for family in answer["raises"])
    assert counts.keys() == set(OPERATIONS[subject].split())
    assert min(counts.values()) >= 5, counts
    expected = set()
    for name, families in SIDES[subject].EXPECTED_ERRORS.items():
        listed = families if isinstance(families, tuple) else (families,)
        expected.update((name, family.__name__) for family in listed)
    assert errors == expected


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("option", ["events", "shares_events", "caching"])
def test_each_option_is_recorded_on_and_off(option, release):
    assert {run["options"][option] for run in RUNS[release] if run["subject"] == "pool"} == {True, False}


@pytest.mark.parametrize(
    ("release", "pool_class"), [("0.31", kv_pool.BlockPool), ("0.30", PartialBlocksOnly)]
)
def test_the_pool_of_the_next_release_is_detected(release, pool_class):
    """The older releases differ from the next ones in what the recordings show."""
    with pytest.raises(AssertionError, match="pool seed"):
        replay_all("pool", with_pool(pool_class, release), release)


# ---- pools with one defect ---------------------------------------------------------------------------


class FreesInReverse(kv_pool.BlockPool):
    def free_blocks(self, ordered_blocks):
        super().free_blocks(list(ordered_blocks)[::-1])


class KeepsOtherPoolsBlocks(kv_pool.BlockPool):
    def free_blocks(self, ordered_blocks):
        super().free_blocks([block for block in ordered_blocks if block.pool in (self, None)])


class CountsTheNullBlockAsUsed(kv_pool.BlockPool):
    def get_usage(self):
        return 1 - self.get_num_free_blocks() / self.num_gpu_blocks


class LosesASecondaryKeyInAMove(kv_pool.BlockPool):
    def move_block_hashes(self, src_block, dst_block):
        super().move_block_hashes(src_block, dst_block)
        for key in list(self.cached_block_hashes_by_block.pop(dst_block.block_id, ())):
            self.cached_block_hash_to_block.pop(key, dst_block.block_id)


class TellsNoCollector(kv_pool.BlockPool):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.metrics_collector = None


class TellsTheCollectorOfNoAccess(kv_pool.BlockPool):
    def touch(self, blocks):
        observer, self.metrics_collector = self.metrics_collector, None
        super().touch(blocks)
        self.metrics_collector = observer


class MovesEvictedBlocksToTheFront(kv_pool.BlockPool):
    def evict_blocks(self, block_ids):
        super().evict_blocks(block_ids)
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
                self.free_block_queue.prepend_n([block])


class UnpinsToTheFront(kv_pool.BlockPool):
    def unpin_blocks(self, blocks, on_reuse):
        super().unpin_blocks(blocks, on_reuse)
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
                self.free_block_queue.prepend_n([block])


class KeepsTheOlderWatcher(kv_pool.BlockPool):
    def unpin_blocks(self, blocks, on_reuse):
        watchers = dict(self.reuse_watchers)
        super().unpin_blocks(blocks, on_reuse)
        self.reuse_watchers.update(watchers)


class ForgetsWatchersInAReset(kv_pool.BlockPool):
    def reset_prefix_cache(self):
        if self.get_num_free_blocks() == self.num_gpu_blocks - 1:
            self.reuse_watchers.clear()
        return super().reset_prefix_cache()


class DoesNotTellOfAReset(kv_pool.BlockPool):
    def reset_prefix_cache(self):
        is_reset = super().reset_prefix_cache()
        if self.kv_event_queue and isinstance(self.kv_event_queue[-1], AllBlocksCleared):
            self.kv_event_queue.pop()
        return is_reset


class CountsReferencesOfTheNullBlock(kv_pool.BlockPool):
    def touch(self, blocks):
        super().touch(blocks)
        for block in blocks:
            block.ref_cnt += block.is_null


class FindsTheNewestCopy(kv_pool.BlockPool):
    def get_cached_block(self, block_hash, kv_cache_group_ids):
        found = super().get_cached_block(block_hash, kv_cache_group_ids)
        for position, group_id in enumerate(kv_cache_group_ids if found else ()):
            entry = self.cached_block_hash_to_block._cache[block_hash + group_id.to_bytes(4, "big")]
            if isinstance(entry, dict):
                found[position] = list(entry.values())[-1]
        return found


class CachesMaskedBlocks(kv_pool.BlockPool):
    def cache_full_blocks(self, *, block_mask, **arguments):
        super().cache_full_blocks(**arguments)


class KeepsReplacedHashes(kv_pool.BlockPool):
    def cache_partial_block(self, *arguments, replace_existing_hashes):
        return super().cache_partial_block(*arguments)


class RaisesAnotherErrorWhenFull(kv_pool.BlockPool):
    def get_new_blocks(self, num_blocks):
        if num_blocks > self.get_num_free_blocks():
            raise RuntimeError("full")
        return super().get_new_blocks(num_blocks)


class AnnouncesNoHits(kv_pool.BlockPool):
    def emit_cached_block_events(self, *arguments):
        pass


class TakesEventsAndKeepsThem(kv_pool.BlockPool):
    def take_events(self):
        return list(self.kv_event_queue)


class PutsRawHashesIntoEvents(kv_pool.BlockPool):
    def take_events(self):
        events = super().take_events()
        for event in events:
            if not isinstance(event, AllBlocksCleared):
                event.block_hashes = [number.to_bytes(8, "big") for number in event.block_hashes]
        return events


class LetsSharersWrite(kv_pool.BlockPool):
    def is_block_writable(self, block):
        return not block.is_null and block.ref_cnt >= 1 and block.block_hash is None


BROKEN_POOLS = [
    found
    for found in list(globals().values())
    if isinstance(found, type) and issubclass(found, kv_pool.BlockPool)
]


@pytest.mark.parametrize("broken", BROKEN_POOLS, ids=lambda broken: broken.__name__)
def test_a_pool_with_one_defect_is_detected(broken):
    with pytest.raises(AssertionError, match="pool seed"):
        replay_all("pool", with_pool(broken))


class FindsNewestFirst:
    """A wrapper of the real map, which cannot be subclassed when compiled."""

    def __init__(self):
        self.real = BlockHashToBlockMap()

    def __getattr__(self, name):
        return getattr(self.real, name)

    def __len__(self):
        return len(self.real)

    def get_one_block(self, key):
        entry = self.real._cache.get(key)
        return list(entry.values())[-1] if isinstance(entry, dict) else self.real.get_one_block(key)


@pytest.mark.parametrize(
    "broken",
    [
        {"BlockHashToBlockMap": FindsNewestFirst},
        {"FreeKVCacheBlockQueue": lambda blocks: FreeKVCacheBlockQueue(blocks[::-1])},
    ],
    ids=lambda broken: next(iter(broken)),
)
def test_a_part_with_one_defect_is_detected(broken):
    names = ["BlockHashToBlockMap", "FreeKVCacheBlockQueue", "KVCacheBlock"]
    classes = SimpleNamespace(**{name: getattr(kv_pool, name) for name in names} | broken)
    with pytest.raises(AssertionError, match="parts seed"):
        replay_all("parts", classes)
