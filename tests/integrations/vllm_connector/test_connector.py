"""The connector under vLLM's scheduler: failures, resets, restarts, events, and what it refuses."""

import logging
import random
import threading
from collections import Counter

import pytest

from kv_pool.errors import InvalidArgumentError, LayoutMismatchError, TierError

pytestmark = pytest.mark.vllm

PROMPT = list(range(1, 42))
OTHERS = [[number * 100 + token for token in range(40)] for number in range(1, 12)]


def fill(engine, prompts=OTHERS):
    """Run other prompts, so that the device evicts the blocks of earlier ones."""
    for number, prompt in enumerate(prompts):
        engine.generate(f"other {number} {len(engine.outputs)}", prompt)


def make_filled(make_engine, *sizes, **options):
    """Return an engine whose device has evicted the blocks of the request "first"."""
    engine = make_engine(*sizes, **options)
    engine.generate("first", PROMPT)
    fill(engine)
    return engine


def tiers_of(engine, rank=0):
    """Return a rank's host tier, and its disk tier if there is one."""
    return engine.ranks[rank].connector.worker.stack.tiers


def test_an_evicted_prefix_is_loaded_from_host_memory(make_engine):
    engine = make_engine(200)
    assert engine.generate("first", PROMPT) == (0, 0)
    fill(engine)
    assert engine.generate("again", PROMPT) == (0, 40)
    assert engine.generate("at once", PROMPT) == (40, 0)


def test_a_prefix_is_loaded_from_disk(checked, make_engine):
    engine = make_filled(make_engine, 24, 200)
    request = engine.add("again", PROMPT)
    output = engine.scheduler.schedule()
    sources = engine.connector.get_external_cache_hit_sources(request, 40)
    assert {source.value: num for source, num in sources.items()} == {"disk": 40}
    engine.execute(output)
    engine.run()
    assert engine.counts["external"] == 40


def test_wrong_bytes_would_be_noticed(make_engine):
    """The engine of these tests fails if a tier returns other bytes."""
    engine = make_filled(make_engine, 200)
    host = tiers_of(engine)[0]
    for key in host.list_keys():
        read = host.read([key])
        read.storage.write_block(read.block_ids[0], bytes(read.storage.block_bytes))
    with pytest.raises(AssertionError, match="wrong KV"):
        engine.generate("again", PROMPT)


def test_skipping_the_prefix_cache_loads_nothing(make_engine):
    engine = make_filled(make_engine, 200)
    request = engine.add("again", PROMPT)
    request.skip_reading_prefix_cache = True
    engine.run()
    assert engine.counts["external"] == 0


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("full",), ("full", "window")], ids="-".join)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_blocks_that_cannot_be_loaded_are_computed(make_engine, kinds, num_ranks):
    engine = make_filled(make_engine, 400, kinds=kinds, num_ranks=num_ranks, num_blocks=24 * len(kinds))
    expected = engine.outputs["first"]
    tiers_of(engine, num_ranks - 1)[0].clear()
    engine.generate("again", PROMPT)
    assert engine.outputs["again"] == expected
    # The index has learned that these blocks are gone, in all ranks, and they are stored again.
    fill(engine)
    before = engine.counts["external"]
    engine.generate("once more", PROMPT)
    assert engine.counts["external"] - before == 40
    assert engine.outputs["once more"] == expected


def test_a_failed_load_fails_the_request_if_told(make_engine, caplog):
    with caplog.at_level(logging.WARNING, "vllm.kv_pool"):
        engine = make_filled(make_engine, 200, policy="fail")
    tiers_of(engine)[0].clear()
    engine.generate("again", PROMPT)
    assert engine.counts["finished: error"] == 1
    engine.generate("next", PROMPT)
    assert len(engine.outputs["next"]) == 1


def test_a_damaged_block_on_disk_is_computed(make_engine, tmp_path):
    engine = make_filled(make_engine, 24, 200)
    expected = engine.outputs["first"]
    (file,) = (tmp_path / "disk").glob("*/blocks")
    file.write_bytes(bytes(file.stat().st_size))
    engine.generate("again", PROMPT)
    assert engine.outputs["again"] == expected
    assert tiers_of(engine)[1].get_statistics().num_read_errors > 0


@pytest.mark.parametrize("ends", ["aborted", "preempted"])
def test_blocks_are_not_reused_while_a_store_reads_them(make_engine, monkeypatch, ends):
    engine = make_engine(200)
    opened = threading.Event()
    worker = engine.ranks[0].connector.worker
    store = worker._copy_down

    def wait_and_store(order):
        assert opened.wait(60)
        return store(order)

    monkeypatch.setattr(worker, "_copy_down", wait_and_store)
    engine.add("first", PROMPT, 20)
    for _ in range(4):
        engine.step(waits=False)
    if ends == "aborted":
        engine.abort("first")
    else:
        engine.scheduler._preempt_request(engine.scheduler.running.pop(), 0.0)
        engine.abort("first")
    for number, prompt in enumerate(OTHERS[:4]):
        engine.add(f"other {number}", prompt)
    for _ in range(12):
        engine.step(waits=False)
    assert len(engine.connector.scheduler.index.host) == 0
    opened.set()
    fill(engine)
    assert engine.generate("again", PROMPT) == (0, 40)


# ---- resets and restarts -------------------------------------------------------------------------


def test_a_reset_clears_all_tiers(make_engine):
    engine = make_filled(make_engine, 24, 200)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    assert len(tiers_of(engine)[0]) == len(tiers_of(engine)[1]) == 0
    assert engine.generate("again", PROMPT) == (0, 0)


def test_a_restarted_engine_finds_its_blocks_on_disk(make_engine):
    engine = make_filled(make_engine, 24, 200)
    expected = engine.outputs["first"]
    engine.close()
    engine = make_engine(24, 200)
    assert engine.generate("again", PROMPT) == (0, 40)
    assert engine.outputs["again"] == expected


def test_without_a_handshake_the_first_step_reports_the_disk(make_engine):
    """vLLM's MultiConnector hands the metadata of one connector to all of its connectors."""
    engine = make_filled(make_engine, 24, 200)
    engine.close()
    engine = make_engine(24, 200, shakes_hands=False)
    assert engine.ranks[0].connector.get_handshake_metadata() is None
    engine.connector.set_xfer_handshake_metadata({0: object()})
    engine.generate("short", [1])
    assert engine.generate("again", PROMPT) == (0, 40)


def test_ranks_have_their_own_folders(make_engine, tmp_path):
    engine = make_filled(make_engine, 24, 200, num_ranks=2)
    engine.close()
    names = {folder.name.partition("-")[2] for folder in (tmp_path / "disk").iterdir()}
    assert names == {"rank0of2", "rank1of2"}
    engine = make_engine(24, 200, num_ranks=2)
    assert engine.generate("again", PROMPT) == (0, 40)


def test_data_parallel_engines_have_their_own_folders(make_engine, tmp_path):
    for engine in range(2):
        make_engine(24, 200, engine=engine, num_ranks=2)
    names = sorted(folder.name.partition("-")[2] for folder in (tmp_path / "disk").iterdir())
    assert names == ["engine1-rank0of2", "engine1-rank1of2", "rank0of2", "rank1of2"]


def test_a_block_on_one_rank_only_is_not_found(make_engine):
    engine = make_filled(make_engine, 24, 200, num_ranks=2)
    tiers_of(engine, 1)[1].clear()
    engine.close()
    engine = make_engine(24, 200, num_ranks=2)
    engine.generate("short", [1])
    assert engine.generate("again", PROMPT) == (0, 0)
    assert len(tiers_of(engine, 0)[1]) == 0


@pytest.mark.parametrize("extra", [{"weights": "v2"}])
def test_other_weights_have_other_folders(make_engine, tmp_path, extra):
    make_engine(24, 200).close()
    make_engine(24, 200, extra=extra).close()
    make_engine(24, 200, kinds=("full", "window")).close()
    assert len(list((tmp_path / "disk").iterdir())) == 3


def test_a_second_engine_cannot_open_the_same_folder(make_engine):
    make_engine(24, 200)
    with pytest.raises(TierError, match="in use by another tier"):
        make_engine(24, 200)


def test_a_changed_description_is_refused(make_engine, tmp_path):
    make_engine(24, 200).close()
    (file,) = (tmp_path / "disk").glob("*/tier.json")
    file.write_text(file.read_text().replace('"block_size": 4', '"block_size": 8'))
    with pytest.raises(LayoutMismatchError, match="block_size is 4 here and 8 there"):
        make_engine(24, 200)


def test_a_shut_down_engine_can_be_shut_down_again(make_engine):
    engine = make_engine(24, 200)
    engine.add("running", PROMPT, 5)
    for _ in range(3):
        engine.step(waits=False)
    engine.close()
    engine.close()


# ---- events and statistics -----------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("full",), ("full", "window")], ids="-".join)
def test_events_tell_what_the_tiers_hold(checked, make_engine, kinds):
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    engine = make_engine(20, 40, kinds=kinds, num_blocks=24 * len(kinds), events=True)
    checked.live(engine, random.Random(1), 30)
    held = Counter()
    for event in engine.published:
        name = type(event).__name__
        if event.medium == "GPU":
            continue
        (block_hash,) = event.block_hashes
        held[event.medium, event.group_idx, block_hash] += 1 if name == "BlockStored" else -1
        if name == "BlockStored":
            assert (event.block_size, len(event.token_ids)) == (4, 4)
            assert event.kv_cache_spec_kind == (
                "full_attention" if kinds[event.group_idx] == "full" else "sliding_window"
            )
    assert set(held.values()) <= {0, 1}
    lists = [event.token_ids for event in engine.published if type(event).__name__ == "BlockStored"]
    assert len({id(token_ids) for token_ids in lists}) == len(lists)  # a reader may change an event
    index = engine.connector.scheduler.index
    expected = {
        (tier.medium, int.from_bytes(key[-4:], "big"), maybe_convert_block_hash(key[:-4]))
        for tier in (index.host, index.disk)
        for key in tier.list_keys()
    }
    assert {place for place, count in held.items() if count} == expected
    assert {medium for medium, _, _ in expected} == {"CPU", "STORAGE"}


def test_a_reset_is_published(make_engine):
    engine = make_filled(make_engine, 20, 40, events=True)
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run()
    stored = [event for event in engine.published if getattr(event, "medium", None) in ("CPU", "STORAGE")]
    assert sum(1 if type(event).__name__ == "BlockStored" else -1 for event in stored) == 0


def test_statistics_of_an_interval(make_engine):
    engine = make_engine(24, 200)
    engine.connector.get_kv_connector_stats()
    engine.generate("first", PROMPT)
    stats = engine.connector.get_kv_connector_stats()
    later = engine.connector.get_kv_connector_stats()
    assert later.is_empty()
    assert later.data["host blocks"] == 10
    merged = stats.aggregate(type(stats)(data={"stored blocks": 3, "host blocks": 7}))
    assert merged.reduce()["host blocks"] == 7
    assert type(engine.connector).build_kv_connector_stats(stats.data).reduce() == merged.reduce()


# ---- without tiers, and configurations that are refused ------------------------------------------


@pytest.mark.parametrize("host", [0, 20])
def test_options_follow_requests_with_and_without_tiers(make_engine, monkeypatch, host):
    from kv_pool.integrations.vllm.connector import vllm_connector

    calls = []

    def report_end(manager, request):
        calls.append(("finished", manager.block_pool.num_gpu_blocks, request.request_id))
        return {"kv_pool": {"tokens": request.num_tokens}}

    monkeypatch.setattr(
        vllm_connector, "note_arrival", lambda manager, request: calls.append(("new", request.request_id))
    )
    monkeypatch.setattr(vllm_connector, "report_end", report_end)
    engine = make_engine(host)
    answers = []
    update = engine.scheduler.update_from_output

    def note(output, answer):
        told = update(output, answer)
        answers.extend(one.kv_transfer_params for outputs in told.values() for one in outputs.outputs)
        return told

    engine.scheduler.update_from_output = note
    engine.generate("first", PROMPT)
    assert calls == [("new", "first"), ("finished", 24, "first")]
    assert answers[-1] == {"kv_pool": {"tokens": 42}}


def test_without_host_memory_there_are_no_tiers(make_engine):
    engine = make_filled(make_engine, 0)
    assert engine.generate("again", PROMPT) == (0, 0)
    assert engine.connector.scheduler is None
    assert engine.ranks[0].connector.worker is None
    assert engine.connector.get_kv_connector_stats() is None
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)


def test_mamba_states_are_refused(make_engine):
    with pytest.raises(InvalidArgumentError, match=r"group 1 is of the kind mamba\. Remove host_bytes"):
        make_engine(20, kinds=("full", "mamba"))


def test_random_hashes_are_refused_on_disk(checked, make_engine, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setattr(checked, "CacheConfig", _with_xxhash(checked.CacheConfig))
    with pytest.raises(InvalidArgumentError, match=r"random seed.*Set PYTHONHASHSEED"):
        make_engine(20, 20)


def _with_xxhash(config_class):
    return lambda **options: config_class(**options, prefix_caching_hash_algo="xxhash")
