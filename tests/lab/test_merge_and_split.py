"""Merged traces keep their requests, splitting gives them back, and both agree with slow models."""

import json
import os
import random

import pytest
from lab.made_trace import COMPRESS, make_random_records, record, write_trace

from kv_pool import InvalidArgumentError, TraceError
from kv_pool.lab import trace_writer
from kv_pool.lab.merge import merge_traces, name_tenants, split_trace
from kv_pool.lab.trace import Trace
from kv_pool.lab.trace_writer import open_trace_writer


def make_parts(folder, seed, num_parts=3, late=False):
    """Write traces with sessions, further fields and equal ids. Return their paths and records."""
    rng = random.Random(seed)
    parts = []
    for number in range(num_parts):
        records = make_random_records(rng, rng.randrange(1, 60), 8, partial_ids=True)
        for one in records:
            one["session_id"] = rng.choice([rng.randrange(5), "x", ["list", 1]])
            one["more"] = {"number": rng.randrange(9), "text": "ü/\u202e"}
            if late and rng.random() < 0.2:
                one["timestamp"] = rng.randrange(500)
        parts.append((write_trace(folder / f"part{number}.jsonl", records), records))
    return parts


def merge(folder, parts, **options):
    path = folder / "merged.jsonl"
    traces = [Trace(one, block_size=8) for one, _ in parts]
    with open_trace_writer(str(path)) as write:
        for line in merge_traces(traces, **options):
            write(line)
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_split_by_tenant_gives_back_the_parts(tmp_path, seed, shared):
    parts = make_parts(tmp_path, seed, late=seed % 2 == 1)
    path = merge(tmp_path, parts, shared=shared)
    (tmp_path / "out").mkdir()
    counts = split_trace(Trace(path, block_size=8), "tenant", str(tmp_path / "out" / "{part}.jsonl"))
    for original, records in parts:
        again = tmp_path / "out" / original.name
        assert read(again) == records
        assert counts[str(again)] == len(records)
    assert len(os.listdir(tmp_path / "out")) == len(counts) == len(parts)


@pytest.mark.parametrize("seed", range(8))
def test_merged_requests_are_ordered_and_disjoint(tmp_path, seed):
    parts = make_parts(tmp_path, seed)
    lines = read(merge(tmp_path, parts))
    # The slow model: all requests, sorted by time; sorting keeps the order of equal times.
    expected = [(one["timestamp"], f"part{number}") for number, (_, ones) in enumerate(parts) for one in ones]
    assert [(one["timestamp"], one["tenant"]) for one in lines] == sorted(expected, key=lambda item: item[0])
    owners = {}
    for one in lines:
        for hash_id in one["hash_ids"]:
            assert owners.setdefault(hash_id, one["tenant"]) == one["tenant"]


def test_shared_ids_stay(tmp_path):
    parts = make_parts(tmp_path, 1)
    lines = read(merge(tmp_path, parts, shared=True))
    ids = {hash_id for one in lines for hash_id in one["hash_ids"]}
    assert ids == {hash_id for _, ones in parts for one in ones for hash_id in one["hash_ids"]}
    assert {one["hash_id_offset"] for one in lines} == {0}


def test_late_requests_come_with_their_predecessors(tmp_path):
    one = write_trace(tmp_path / "a.jsonl", [record(8, [number], 0, t) for number, t in enumerate((5, 1, 9))])
    other = write_trace(tmp_path / "b.jsonl", [record(8, [number], 0, t) for number, t in enumerate((4, 6))])
    found = merge_traces([Trace(one, block_size=8), Trace(other, block_size=8)])
    assert [(line["tenant"], int(bytes(line["timestamp"]))) for line in found] == [
        ("b", 4),
        ("a", 5),
        ("a", 1),
        ("b", 6),
        ("a", 9),
    ]


def test_token_id_traces_are_merged_if_shared(tmp_path):
    path = write_trace(tmp_path / "a.jsonl", [{"token_ids": [1, 2, 3]}])
    traces = [Trace(path), Trace(path)]
    with pytest.raises(InvalidArgumentError, match="token ids, which cannot be renumbered; pass --shared"):
        merge_traces(traces)
    found = list(merge_traces(traces, shared=True))
    assert [line["tenant"] for line in found] == ["a", "a-2"]
    assert all("hash_ids" not in line for line in found)


def test_tenants_are_named_by_their_files(tmp_path):
    names = ["chat.jsonl.gz", "b.xz", "chat.gz", ".hidden"]
    for name in names:
        write_trace((tmp_path / name).with_suffix(".jsonl"), [record(8, [1])]).rename(tmp_path / name)
    traces = [Trace(tmp_path / name, block_size=8) for name in names]
    assert name_tenants(traces) == ["chat", "b", "chat-2", ".hidden"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tenants": ["a"]}, "1 names for 2 traces"),
        ({"tenants": ["a", "a"]}, "two tenants have the same name: a, a"),
    ],
)
def test_invalid_names_are_refused(tmp_path, options, message):
    path = write_trace(tmp_path / "a.jsonl", [record(8, [1])])
    with pytest.raises(InvalidArgumentError, match=message):
        merge_traces([Trace(path, block_size=8)] * 2, **options)


def test_unequal_block_sizes_are_refused(tmp_path):
    path = write_trace(tmp_path / "a.jsonl", [record(8, [1])])
    with pytest.raises(InvalidArgumentError, match=r"16 tokens per hash id, and .* has 8 tokens per hash id"):
        merge_traces([Trace(path, block_size=8), Trace(path, block_size=16)])
    with pytest.raises(InvalidArgumentError, match="there are no traces"):
        merge_traces([])


def test_ids_beyond_64_bits_are_refused(tmp_path):
    path = write_trace(tmp_path / "a.jsonl", [record(8, [2**63])])
    with pytest.raises(InvalidArgumentError, match="do not fit behind the 9223372036854775809 ids"):
        merge_traces([Trace(path, block_size=8)] * 2)


def test_merged_trace_is_not_merged_again(tmp_path):
    path = merge(tmp_path, make_parts(tmp_path, 3))
    with pytest.raises(TraceError, match=r"merged\.jsonl:1: the request has a tenant already"):
        list(merge_traces([Trace(path, block_size=8)]))


@pytest.mark.parametrize("offset", ['"x"', "-1", "7", "1.5", "null"])
def test_wrong_offset_is_a_broken_line(tmp_path, offset):
    line = f'{{"input_length": 8, "hash_ids": [5], "tenant": "a", "hash_id_offset": {offset}}}'
    trace = Trace(write_trace(tmp_path / "a.jsonl", [line]), block_size=8)
    with pytest.raises(TraceError, match=r"a\.jsonl:1: "):
        split_trace(trace, "tenant", str(tmp_path / "{part}.gz"))
    assert os.listdir(tmp_path) == ["a.jsonl"]


# ---- splits ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("buffered", [1, 64 << 20])
def test_sessions_are_dealt_in_order(tmp_path, monkeypatch, suffix, buffered):
    """With little memory each line is a compressed stream of its own."""
    monkeypatch.setattr(trace_writer, "_MAX_BUFFERED_BYTES", buffered)
    ((path, records),) = make_parts(tmp_path, 4, num_parts=1)
    (tmp_path / "out").mkdir()
    pattern = str(tmp_path / "out" / ("{part}" + suffix))
    counts = split_trace(Trace(path, block_size=8), "session", pattern, num_parts=2)
    numbers, expected = {}, {}
    for one in records:
        number = numbers.setdefault(str(one["session_id"]), len(numbers)) % 2
        expected.setdefault(number, []).append(one["hash_ids"])
    assert len(counts) == len(expected)
    for number, (part, count) in zip(expected, counts.items(), strict=True):
        assert part == pattern.replace("{part}", f"0000{number}")
        assert [one.hash_ids for one in Trace(part, block_size=8)] == expected[number]
        assert count == len(expected[number])


def test_each_session_gets_a_file(tmp_path):
    lines = [record(8, [number], session_id=session) for number, session in enumerate("abac")]
    lines.append(record(8, [9]))
    path = write_trace(tmp_path / "trace.jsonl", lines)
    counts = split_trace(Trace(path, block_size=8), "session", str(tmp_path / "part-{part}.jsonl"))
    assert {os.path.basename(one): count for one, count in counts.items()} == {
        "part-a.jsonl": 2,
        "part-b.jsonl": 1,
        "part-c.jsonl": 1,
        "part-none.jsonl": 1,
    }
    assert read(tmp_path / "part-a.jsonl") == [lines[0], lines[2]]


def test_time_is_cut_into_equal_parts(tmp_path):
    times = [0, 1999, 2000, 2001, 9000]
    path = write_trace(tmp_path / "trace.jsonl", [record(8, [1], 0, time) for time in times])
    split_trace(Trace(path, block_size=8), "time", str(tmp_path / "{part}.jsonl"), every_s=2.0)
    found = {name: len(read(tmp_path / name)) for name in os.listdir(tmp_path) if name[0] == "0"}
    assert found == {"00000.jsonl": 2, "00001.jsonl": 2, "00004.jsonl": 1}
    assert [one["timestamp"] for one in read(tmp_path / "00001.jsonl")] == [2000, 2001]


def test_names_of_parts_stay_in_the_folder(tmp_path):
    names = ["../up", "/etc/passwd", "a b", "a_b", "A_B", "", "..", "x" * 500, "\x00\n"]
    lines = [record(8, [1], session_id=name) for name in names]
    path = write_trace(tmp_path / "trace.jsonl", lines)
    (tmp_path / "out").mkdir()
    counts = split_trace(Trace(path, block_size=8), "session", str(tmp_path / "out" / "{part}.jsonl"))
    assert len(counts) == len(names)
    assert sorted(os.listdir(tmp_path)) == ["out", "trace.jsonl"]
    found = sorted(os.listdir(tmp_path / "out"))
    assert {"_up.jsonl", "_etc_passwd.jsonl", "a_b.jsonl", "a_b-2.jsonl", "A_B-3.jsonl"} <= set(found)
    assert max(map(len, found)) == 86


def test_broken_line_leaves_no_files(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [record(8, [1]), record(8, [2]), "broken"])
    (tmp_path / "none.gz").write_text("before")
    with pytest.raises(TraceError, match=r"trace\.jsonl:3: "):
        split_trace(Trace(path, block_size=8), "session", str(tmp_path / "{part}.gz"))
    assert sorted(os.listdir(tmp_path)) == ["none.gz", "trace.jsonl"]
    assert (tmp_path / "none.gz").read_text() == "before"


def test_number_of_files_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_writer, "MAX_PARTS", 3)
    path = write_trace(tmp_path / "trace.jsonl", [record(8, [1], session_id=number) for number in range(4)])
    with pytest.raises(InvalidArgumentError, match="line 4 would begin file 4; use fewer parts"):
        split_trace(Trace(path, block_size=8), "session", str(tmp_path / "{part}.jsonl"))
    assert os.listdir(tmp_path) == ["trace.jsonl"]


@pytest.mark.parametrize(
    ("by", "pattern", "options", "message"),
    [
        ("turn", "{part}.gz", {}, "cannot split by 'turn'; known are session, tenant, time"),
        ("session", "part.gz", {}, r"has no \{part\}"),
        ("session", "{part}/x.gz", {}, r"has no \{part\}"),
        ("session", "{part}.gz", {"num_parts": 0}, "0 parts are not in 1..10000"),
        ("tenant", "{part}.gz", {"num_parts": 2}, "a number of parts is for a split by session"),
        ("time", "{part}.gz", {}, r"needs the seconds of a part \(--every\)"),
        ("session", "{part}.gz", {"every_s": 2.0}, "a split by time, and no other"),
        ("time", "{part}.gz", {"every_s": 0.0}, "a part of 0.0 seconds is not above 0"),
        ("time", "nowhere/{part}.gz", {"every_s": 1.0}, "cannot write the parts: there is no folder"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path, by, pattern, options, message):
    path = write_trace(tmp_path / "trace.jsonl", [record(8, [1])])
    with pytest.raises((InvalidArgumentError, TraceError), match=message):
        split_trace(Trace(path, block_size=8), by, str(tmp_path / pattern), **options)
