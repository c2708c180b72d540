"""Conversions keep the prefix structure, through each format and back, and refuse broken input."""

import json
import math
import os
import random
from pathlib import Path

import pytest
from lab.made_trace import make_random_records, write_trace

from kv_pool import InvalidArgumentError, TraceError
from kv_pool.lab.formats import convert
from kv_pool.lab.formats.convert import ConvertSettings, convert_trace
from kv_pool.lab.trace import Trace
from kv_pool.lab.trace_info import describe_trace

BLOCK_SIZE = 8


def make_trace(folder, seed, partial_ids=False, tokens=False):
    rng = random.Random(seed)
    records = make_random_records(rng, 120, BLOCK_SIZE, partial_ids)
    for one in records:
        one["session_id"] = f"s{rng.randrange(9)}"
        if tokens:
            one["token_ids"] = [hash_id for hash_id in one.pop("hash_ids") for _ in range(BLOCK_SIZE)]
            del one["token_ids"][one["input_length"] :]
            one["token_ids"] += [10**6 + len(one["token_ids"])] * (
                one["input_length"] - len(one["token_ids"])
            )
    return write_trace(folder / "trace.jsonl", records), records


def run(source, source_format, target, target_format="mooncake", **options):
    settings = ConvertSettings(str(source), source_format, target_format, **options)
    return convert_trace(settings, str(target))


def through(folder, path, target_format, **options):
    """Convert a trace to a format and back. Return the path."""
    middle = folder / "middle"
    if target_format == "kv-cache-tester":
        middle.mkdir()
        run(path, "mooncake", middle / "trace_{part}.json", target_format, trace_block_size=BLOCK_SIZE)
    else:
        run(path, "mooncake", middle, target_format, trace_block_size=BLOCK_SIZE)
    run(middle, target_format, folder / "again.jsonl", **options)
    return folder / "again.jsonl"


def number_by_appearance(records, keep_partial=True):
    """Return the hash ids of records, numbered by first appearance."""
    ids = {}
    found = []
    for one in records:
        hash_ids = one["hash_ids"] if keep_partial else one["hash_ids"][: one["input_length"] // BLOCK_SIZE]
        found.append([ids.setdefault(hash_id, len(ids)) for hash_id in hash_ids])
    return found


@pytest.mark.parametrize("partial_ids", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["mooncake", "lmcache", "dynamo"])
def test_requests_come_back_through_lines(tmp_path, name, seed, partial_ids):
    path, records = make_trace(tmp_path, seed, partial_ids)
    options = {"trace_block_size": BLOCK_SIZE} if name == "mooncake" else {}
    again = list(Trace(through(tmp_path, path, name, **options), block_size=BLOCK_SIZE))
    assert [one.arrival_ms for one in again] == [
        one["timestamp"] - records[0]["timestamp"] for one in records
    ]
    assert [one.input_length for one in again] == [one["input_length"] for one in records]
    found = [one.hash_ids for one in again]
    if name == "dynamo":
        # Each partial last block has a hash, so that ids are numbered differently.
        num_ids = [-(-one["input_length"] // BLOCK_SIZE) for one in records]
        assert list(map(len, found)) == num_ids
        again_records = [
            {"hash_ids": ids, "input_length": one["input_length"]}
            for ids, one in zip(found, records, strict=True)
        ]
        assert number_by_appearance(again_records, False) == number_by_appearance(records, False)
    else:
        assert found == number_by_appearance(records, name == "mooncake")
    if name != "lmcache":
        assert [one.output_length for one in again] == [one["output_length"] for one in records]
        assert [one.session_id for one in again] == [one["session_id"] for one in records]


@pytest.mark.parametrize("seed", range(4))
def test_requests_come_back_through_sessions(tmp_path, seed):
    path, records = make_trace(tmp_path, seed, partial_ids=True)
    again = through(tmp_path, path, "kv-cache-tester")
    assert len(os.listdir(tmp_path / "middle")) == len({one["session_id"] for one in records})
    by_session = {}
    for one in Trace(again, block_size=BLOCK_SIZE):
        by_session.setdefault(one.session_id, []).append(one)
    original = {}
    for one in records:
        original.setdefault(one["session_id"], []).append(one)
    assert by_session.keys() == original.keys()
    for name, ones in original.items():
        found = by_session[name]
        assert [one.arrival_ms for one in found] == [one["timestamp"] - ones[0]["timestamp"] for one in ones]
        assert [one.output_length for one in found] == [one["output_length"] for one in ones]
    # Sessions overlap differently, so that only the sets of blocks can be compared.
    distinct = {ids[at] for one in records for ids in [one["hash_ids"]] for at in range(full(one))}
    assert describe_trace(Trace(again, block_size=BLOCK_SIZE)).distinct_blocks == len(distinct)


def full(one):
    return one["input_length"] // BLOCK_SIZE


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["vllm", "mooncake"])
def test_token_ids_come_back(tmp_path, name, seed):
    path, records = make_trace(tmp_path, seed, tokens=True)
    again = list(Trace(through(tmp_path, path, name)))
    assert [one.token_ids for one in again] == [one["token_ids"] for one in records]
    assert [one.output_length for one in again] == [one["output_length"] for one in records]


@pytest.mark.parametrize("name", ["lmcache", "dynamo", "mooncake", "vllm"])
def test_hits_of_token_ids_and_hash_ids_are_equal(tmp_path, name):
    path, _ = make_trace(tmp_path, 5, tokens=True)
    expected = describe_trace(Trace(path), BLOCK_SIZE)
    run(path, "mooncake", tmp_path / "middle", name, block_size=BLOCK_SIZE)
    options = {"trace_block_size": BLOCK_SIZE} if name == "mooncake" else {"block_size": BLOCK_SIZE}
    run(tmp_path / "middle", name, tmp_path / "again.jsonl", **options)
    found = describe_trace(Trace(tmp_path / "again.jsonl", block_size=BLOCK_SIZE))
    assert found.ceilings["full_blocks"].tokens_hit == expected.ceilings["full_blocks"].tokens_hit > 0
    assert found.inconsistent_requests == 0


def test_logs_are_sorted_by_arrival(tmp_path, monkeypatch):
    """A Dynamo record is written when its request ends."""
    lines = [dynamo_line(received, [received]) for received in (500, 100, 300, 200)]
    path = write_trace(tmp_path / "log.jsonl", lines)
    report = run(path, "dynamo", tmp_path / "out.jsonl")
    assert (report.num_late, report.num_requests) == (0, 4)
    assert [one.arrival_ms for one in Trace(tmp_path / "out.jsonl", block_size=8)] == [0, 100, 200, 400]
    monkeypatch.setattr(convert, "MAX_REORDERED", 1)
    assert run(path, "dynamo", tmp_path / "out.jsonl").num_late == 1


def dynamo_line(received, hashes, **more):
    replay = {"trace_block_size": 8, "input_length": 8 * len(hashes), "input_sequence_hashes": hashes}
    request = {"request_received_ms": received, "replay": replay, **more}
    return {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request}


def test_tenants_stay_in_mooncakes_format(tmp_path):
    line = {"input_length": 8, "hash_ids": [7], "tenant": "a", "session_id": "x"}
    path = write_trace(tmp_path / "trace.jsonl", [line])
    run(path, "mooncake", tmp_path / "out.jsonl", trace_block_size=8)
    found = json.loads((tmp_path / "out.jsonl").read_text())
    assert (found["tenant"], found["session_id"], found["hash_ids"]) == ("a", "x", [0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("x", "weka"), "unknown format 'weka'; known are mooncake, kv-cache-tester, lmcache, vllm"),
        (("x", "mooncake", "weka"), "unknown format 'weka'; known are mooncake, kv-cache-tester"),
        (("x", "mooncake", "events"), "events depend on a pool and its size: run kv-pool replay"),
        (("x", "kv-cache-tester", "mooncake", None, None, -1.0), "session_gap_s is -1"),
        (("x", "kv-cache-tester", "mooncake", None, None, math.inf), "session_gap_s is inf"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        convert_trace(ConvertSettings(*options), "out")


@pytest.mark.parametrize("name", [*convert.READ_LOSSES])
def test_missing_input_is_an_error(tmp_path, name):
    with pytest.raises(TraceError, match="nowhere"):
        run(tmp_path / "nowhere", name, tmp_path / "out")


@pytest.mark.parametrize("name", [name for name in convert.READ_LOSSES if name != "mooncake"])
def test_folder_without_files_is_an_error(tmp_path, name):
    with pytest.raises(TraceError, match="no file"):
        run(tmp_path, name, tmp_path / "out")


@pytest.mark.parametrize("name", ["lmcache", "vllm", "dynamo", "events", "csv", "qwen-bailian"])
def test_input_without_requests_writes_nothing(tmp_path, name):
    (tmp_path / "in").write_text("\n  \n")
    with pytest.raises(TraceError, match="the input contains no request"):
        run(tmp_path / "in", name, tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("name", ["lmcache", "dynamo", "events", "qwen-bailian", "mooncake"])
def test_a_csv_file_is_recognised(tmp_path, name):
    (tmp_path / "in").write_text("timestamp,input_length\n0,24\n")
    with pytest.raises(TraceError, match=r"in:1: this is CSV, with the columns timestamp,input_length; "):
        run(tmp_path / "in", name, tmp_path / "out")
    (tmp_path / "in").write_bytes(b"a,\xff\n")
    with pytest.raises(TraceError, match=r"in:1: (?!this is CSV)"):
        run(tmp_path / "in", name, tmp_path / "out")


def test_a_broken_log_is_not_taken_for_csv(tmp_path):
    (tmp_path / "in").write_text(GOOD["vllm"].replace("[1, 2]", "[1, 'x']"))
    with pytest.raises(TraceError, match="in:1: the token ids are not a list of integers"):
        run(tmp_path / "in", "vllm", tmp_path / "out")


# ---- broken input ------------------------------------------------------------------------------

GOOD = {
    "lmcache": json.dumps({"timestamp": 1.5, "chunk_size": 8, "seq_len": 9, "chunk_hashes": ["0xa"]}),
    "dynamo": json.dumps(dynamo_line(5, [1, 2])),
    "vllm": "DEBUG 11-23 18:30:01 [x.py:1] Request a details: prompt: 'p', prompt_token_ids: [1, 2].",
    "events": json.dumps(
        {"kind": "stored", "ts": 1.0, "block_hashes": [1], "parent_block_hash": None, "block_size": 8}
    ),
}


def change(name, **fields):
    return json.dumps(json.loads(GOOD[name]) | fields)


def change_request(**fields):
    line = json.loads(GOOD["dynamo"])
    line["request"] |= fields
    return json.dumps(line)


def change_replay(**fields):
    replay = json.loads(GOOD["dynamo"])["request"]["replay"] | fields
    return change_request(replay=replay)


NESTED = '{"more": ' + "[" * 10**5 + "]" * 10**5 + "}"
BROKEN = {
    "lmcache": [
        "nonsense",
        "[1]",
        NESTED,
        b"\xff\xfe",
        change("lmcache", seq_len=0),
        change("lmcache", chunk_size=0),
        change("lmcache", chunk_size=16, seq_len=17),
        change("lmcache", chunk_hashes=["0xa", "0xb", "0xc"]),
        change("lmcache", chunk_hashes=["hash"]),
        change("lmcache", chunk_hashes=None),
    ],
    "dynamo": [
        change("dynamo", schema="dynamo.request.trace.v9"),
        change("dynamo", request=None),
        change_request(replay=None),
        change_request(output_tokens=-1),
        change_replay(input_length=2**64, trace_block_size=2**63),
        change_replay(input_length=40),
        change_replay(trace_block_size=0),
        change_replay(trace_block_size=16, input_length=32),
        change_replay(input_sequence_hashes=["a", "b"]),
        json.dumps({"hash_ids": [1, 2], "output_length": 3}),
    ],
    "vllm": [
        b"\xff\xfe Request a details: prompt: 'p', prompt_token_ids: [1]",
        GOOD["vllm"].replace("[1, 2]", "None"),
        GOOD["vllm"].replace("[1, 2]", "[]"),
        GOOD["vllm"].replace("[1, 2]", "[1, -2]"),
        GOOD["vllm"].replace("[1, 2]", "[1, 'x']"),
        GOOD["vllm"].replace("[1, 2].", "[1, 2"),
        GOOD["vllm"].replace("11-23", "13-41"),
        GOOD["vllm"].replace("11-23 18:30:01", ""),
        "DEBUG 11-23 18:30:01 [x.py:1] Generated response a details: output_token_ids: [1, 2",
        '{"message": "Request a details: prompt: None, prompt_token_ids: [1, 2',
        '{"message": "Request a details: prompt: None, prompt_token_ids: None, x: None"}',
    ],
    "events": [
        "{}",
        change("events", block_hashes=[]),
        change("events", block_size=None),
        change("events", block_size=16),
        change("events", block_hashes=[-1]),
        change("events", block_hashes=[2**64]),
        change("events", block_hashes=[3, 3]),
        change("events", parent_block_hash=99),
        change("events", parent_block_hash=1, block_hashes=[1]),
        change("events", ts=-1),
    ],
}
CASES = [(name, number) for name, lines in BROKEN.items() for number in range(len(lines))]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_broken_line_is_named_or_skipped(tmp_path, name, number):
    path = write_trace(tmp_path / "log.jsonl", [GOOD[name], BROKEN[name][number], GOOD[name]])
    with pytest.raises(TraceError) as caught:
        run(path, name, tmp_path / "out.jsonl")
    assert str(caught.value).startswith(f"{path}:2: ")
    assert not Path(tmp_path / "out.jsonl").exists()
    report = run(path, name, tmp_path / "out.jsonl", skip_broken=True)
    assert report.num_broken in (0, 1)  # a response is read in the first of two passes
    assert report.num_requests >= 1


@pytest.mark.parametrize("name", ["lmcache", "vllm", "dynamo", "events"])
def test_random_damage_is_a_trace_error(tmp_path, name):
    """A byte of each line is changed: the line stays readable, or is an error of the library."""
    rng = random.Random(name)
    num_errors = 0
    for _ in range(150):
        lines = [bytearray(GOOD[name].encode()) for _ in range(2)]
        lines[1][rng.randrange(len(lines[1]))] = rng.randrange(256)
        path = write_trace(tmp_path / "log.jsonl", [bytes(line) for line in lines])
        try:
            run(path, name, tmp_path / "out.jsonl")
        except TraceError:
            num_errors += 1
    assert num_errors > 10


BIG = [
    (
        {"timestamp": 0, "input_length": 8, "output_length": 4_000_001, "hash_ids": [1]},
        "the output has 4,000,001",
    ),
    (
        {"timestamp": 0, "input_length": 2**22, "output_length": 1, "hash_ids": [1]},
        "the prompt has 4,194,304",
    ),
    (
        {"timestamp": 1e16, "input_length": 8, "output_length": 1, "hash_ids": [1]},
        "the request arrives 1e\\+16 ms",
    ),
]


@pytest.mark.parametrize(("line", "message"), BIG)
def test_size_of_a_log_follows_the_input_and_not_its_numbers(tmp_path, line, message):
    """80 bytes with an output of 150,000,000 tokens took 1.65 GB, and 450 MB on disk."""
    path = write_trace(tmp_path / "trace.jsonl", [json.loads(GOOD_ROW), line])
    with pytest.raises(TraceError, match=rf"trace\.jsonl:2: {message}"):
        run(path, "dynamo", tmp_path / "out", "vllm", trace_block_size=line["input_length"])
    assert not Path(tmp_path / "out").exists()


GOOD_ROW = json.dumps({"timestamp": 0, "input_length": 8, "hash_ids": [1]})


def test_block_size_of_a_file_may_be_any_number(tmp_path):
    replay = {"trace_block_size": 10**12, "input_length": 3, "input_sequence_hashes": [7]}
    request = {"request_received_ms": 1, "replay": replay}
    line = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request}
    run(write_trace(tmp_path / "log.jsonl", [line]), "dynamo", tmp_path / "out", "vllm")
    assert "prompt_token_ids: [0, 0, 0]," in (tmp_path / "out").read_text()


def test_times_that_look_like_another_unit_are_noted(tmp_path):
    lines = [{"timestamp": 30.5 * number, "input_length": 8, "hash_ids": [1]} for number in range(5)]
    path = write_trace(tmp_path / "rows.jsonl", lines)
    report = run(path, "dynamo", tmp_path / "out.jsonl", trace_block_size=8)
    assert "pass --time-unit s" in "".join(report.notes)
    report = run(path, "dynamo", tmp_path / "out.jsonl", trace_block_size=8, timestamp_unit="s")
    assert report.notes == ()
    arrivals = [one.arrival_ms for one in Trace(tmp_path / "out.jsonl", block_size=8)]
    assert arrivals == [0, 30_500, 61_000, 91_500, 122_000]


@pytest.mark.parametrize(("name", "unit"), [("vllm", "s"), ("events", "ms"), ("dynamo", "minutes")])
def test_units_that_cannot_be_given_are_refused(tmp_path, name, unit):
    path = write_trace(tmp_path / "log.jsonl", [GOOD[name]])
    with pytest.raises(InvalidArgumentError, match=r"--time-unit has no effect|timestamp_unit is 'minutes'"):
        run(path, name, tmp_path / "out.jsonl", timestamp_unit=unit)
