"""Sessions of kv-cache-tester: clocks, scopes of ids, sub-agents, and broken files."""

import json
import lzma

import pytest

from kv_pool import TraceError
from kv_pool.lab.formats.kv_cache_tester import KVCacheTesterReader


def request(t, hash_ids, num_tokens=None, out=3, **more):
    # The fields of traces/trace_0003.json.
    return {
        "t": t,
        "type": "s",
        "model": "claude-opus-4-5-20251101",
        "in": 64 * len(hash_ids) + 5 if num_tokens is None else num_tokens,
        "out": out,
        "hash_ids": hash_ids,
        "input_types": ["text"],
        "output_types": ["text"],
        "stop": "",
        **more,
    }


def write(folder, number, requests, **more):
    path = folder / f"trace_{number:04}.json"
    session = {"id": f"trace_{number:04}", "models": ["m"], "block_size": 64, "tool_tokens": 1}
    path.write_text(json.dumps({**session, "system_tokens": 2, "requests": requests, **more}))
    return path


def read(path, **options):
    return list(KVCacheTesterReader(path, **options))


def test_session_is_read(tmp_path):
    path = write(tmp_path, 3, [request(0.0, [1, 2]), request(4.5, [1, 2, 3], out=None)])
    first, second = read(path)
    assert (first.session_id, first.arrival_ms, first.input_length, first.output_length) == (
        "trace_0003",
        0.0,
        133,
        3,
    )
    assert (second.arrival_ms, second.output_length) == (4500.0, 0)
    assert second.hash_ids[:2] == first.hash_ids


def test_ids_are_local_unless_their_scope_is_global(tmp_path):
    for number in range(2):
        write(tmp_path, number, [request(0.0, [1])])
    one, other = read(tmp_path)
    assert one.hash_ids != other.hash_ids
    for number in range(2):
        write(tmp_path, number, [request(0.0, [1])], hash_id_scope="global")
    one, other = read(tmp_path)
    assert one.hash_ids == other.hash_ids


def test_sessions_start_one_after_the_other(tmp_path):
    for number in range(3):
        write(tmp_path, number, [request(0.0, [1]), request(15.0, [1])])
    found = [(one.session_id[-1], one.arrival_ms) for one in read(tmp_path, session_gap_s=10.0)]
    assert found == [
        ("0", 0.0),
        ("1", 10_000.0),
        ("0", 15_000.0),
        ("2", 20_000.0),
        ("1", 25_000.0),
        ("2", 35_000.0),
    ]


def test_files_are_opened_when_their_session_starts(tmp_path):
    for number in range(3):
        write(tmp_path, number, [request(0.0, [1]), request(15.0, [1])])
    (tmp_path / "trace_0002.json").write_text("broken")
    requests = iter(KVCacheTesterReader(tmp_path, session_gap_s=20.0))
    assert [next(requests).arrival_ms for _ in range(4)] == [0.0, 15_000.0, 20_000.0, 35_000.0]
    with pytest.raises(TraceError, match=r"trace_0002\.json:1: "):
        next(requests)


@pytest.mark.parametrize("inner_t", [(0.0, 2.0), (10.0, 12.0)], ids=["relative", "absolute"])
def test_sub_agents_are_on_the_clock_of_their_session(tmp_path, inner_t):
    agent = {
        "t": 10.0,
        "type": "subagent",
        "agent_id": "a",
        "requests": [request(t, [9]) for t in inner_t],
    }
    path = write(tmp_path, 0, [request(0.0, [1]), agent, request(11.0, [1, 2])])
    assert [(one.arrival_ms, len(one.hash_ids)) for one in read(path)] == [
        (0.0, 1),
        (10_000.0, 1),
        (11_000.0, 2),
        (12_000.0, 1),
    ]


def test_long_names_of_lengths_are_read(tmp_path):
    path = write(tmp_path, 0, [{"t": 0.5, "input_length": 70, "output_length": 4, "hash_ids": [2**70]}])
    assert [(one.input_length, one.output_length) for one in read(path)] == [(70, 4)]


def test_compressed_sessions_are_read(tmp_path):
    path = write(tmp_path, 0, [request(0.0, [1])])
    packed = path.with_suffix(".json.xz")
    packed.write_bytes(lzma.compress(path.read_bytes()))
    assert read(packed) == read(path)


BROKEN = {
    "not JSON": "nonsense",
    "no requests": '{"block_size": 64}',
    "no block size": '{"requests": []}',
    "no ids": json.dumps({"block_size": 64, "requests": [{"t": 0.0, "in": 65}]}),
    "no length": json.dumps({"block_size": 64, "requests": [{"t": 0.0, "hash_ids": []}]}),
    "time of 1e308": json.dumps({"block_size": 64, "requests": [request(1e308, [1])]}),
    "too few ids": json.dumps({"block_size": 64, "requests": [request(0.0, [1], 300)]}),
    "negative time": json.dumps({"block_size": 64, "requests": [request(-1.0, [1])]}),
    "negative output": json.dumps({"block_size": 64, "requests": [request(1.0, [1], out=-1)]}),
    "other block size": json.dumps({"block_size": 32, "requests": [request(1.0, [1, 2], 64)]}),
    "cut off": lzma.compress(b"{" * 9999)[:-9],
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_file_is_named_or_skipped(tmp_path, kind):
    write(tmp_path, 0, [request(0.0, [1])])
    path = write(tmp_path, 1, [])
    data = BROKEN[kind]
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    write(tmp_path, 2, [request(0.0, [1])])
    with pytest.raises(TraceError) as caught:
        read(tmp_path)
    assert str(caught.value).startswith(f"{path}:1: ")
    reader = KVCacheTesterReader(tmp_path, skip_broken=True)
    for _ in range(2):
        assert len(list(reader)) == 2
        assert reader.num_broken == 1
        assert reader.first_broken.startswith(f"{path}:1: ")


def test_absent_fields_may_be_null(tmp_path):
    nulls = dict.fromkeys(("t", "type", "out", "input_length", "output_length", "hash_ids", "requests"))
    path = write(tmp_path, 0, [{**nulls, "in": 5}], hash_id_scope=None, id=None)
    (one,) = read(path)
    assert (one.arrival_ms, one.input_length, one.output_length, one.hash_ids) == (0.0, 5, 0, [])


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.xz"])
def test_a_file_may_have_a_session_on_each_line(tmp_path, suffix):
    """The data sets of Weka's traces have one file, traces.jsonl."""
    sessions = [
        {
            "id": name,
            "block_size": 64,
            "hash_id_scope": "local",
            "requests": [request(0.0, [1]), request(9.5, [1, 2])],
        }
        for name in ("a", "b")
    ]
    sessions.append({"block_size": 64, "requests": [request(1.0, [1])]})
    text = "\n".join(map(json.dumps, sessions)).encode()
    path = tmp_path / f"traces{suffix}"
    path.write_bytes(lzma.compress(text) if suffix.endswith("xz") else text)
    found = read(path, session_gap_s=5.0)
    assert [(one.session_id.split(".")[0], one.arrival_ms, one.line) for one in found] == [
        ("a", 0.0, 1),
        ("b", 5000.0, 2),
        ("a", 9500.0, 1),
        ("traces" if suffix == ".jsonl.xz" else "traces-3", 11_000.0, 3),
        ("b", 14_500.0, 2),
    ]
    assert found[0].hash_ids[0] == found[2].hash_ids[0] != found[1].hash_ids[0]
    if suffix == ".jsonl":
        assert read(tmp_path, session_gap_s=5.0) == found


def test_broken_sessions_of_a_file_are_named_or_skipped(tmp_path):
    good = json.dumps({"id": "a", "block_size": 64, "requests": [request(0.0, [1])]})
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join([good, "nonsense", good]))
    with pytest.raises(TraceError, match=r"traces\.jsonl:2: "):
        read(path)
    reader = KVCacheTesterReader(path, skip_broken=True)
    assert len(list(reader)) == 2
    assert reader.num_broken == 1
    assert reader.first_broken.startswith(f"{path}:2: ")


def test_times_may_be_in_another_unit(tmp_path):
    path = write(tmp_path, 0, [request(0.0, [1]), request(1500.0, [1])])
    assert [one.arrival_ms for one in read(path, timestamp_unit="ms")] == [0.0, 1500.0]
