"""Lines as LMCache, Dynamo and vLLM write them."""

import gzip
import json
import lzma

import pytest
from lab.made_trace import write_trace

from kv_pool import TraceError
from kv_pool.lab.formats.dynamo import DynamoReader
from kv_pool.lab.formats.kv_cache_tester import KVCacheTesterReader
from kv_pool.lab.formats.lmcache import LMCacheReader
from kv_pool.lab.formats.vllm_log import VLLMLogReader

# ---- LMCache -----------------------------------------------------------------------------------


def lookup(timestamp, hashes, seq_len, **more):
    return {
        "timestamp": timestamp,
        "request_id": "req-001",
        "model_name": "a-model",
        "chunk_size": 256,
        "seq_len": seq_len,
        "dtypes": ["float8_e4m3fn"],
        "shapes": [[32, 256, 128]],
        "chunk_hashes": hashes,
        **more,
    }


def test_lookups_are_read(tmp_path):
    lines = [lookup(1711929600.123, ["0xabcd", "0xef56"], 600), lookup(1711929601.0, ["0xABCD"], 256)]
    reader = LMCacheReader(write_trace(tmp_path / "log.jsonl", lines))
    first, second = reader
    assert reader.block_size == 256
    assert (first.arrival_ms, first.input_length, len(first.hash_ids)) == (1711929600123.0, 600, 2)
    assert second.hash_ids == first.hash_ids[:1]


def test_models_have_chunks_of_their_own(tmp_path):
    lines = [lookup(1.0, ["0xa"], 300), lookup(1.0, ["0xa"], 300, model_name="other")]
    one, other = LMCacheReader(write_trace(tmp_path / "log.jsonl", lines))
    assert one.hash_ids != other.hash_ids


def test_folder_is_read_in_the_order_of_names(tmp_path):
    for number in (2, 1):
        write_trace(tmp_path / f"lookup_hashes_{number}.jsonl", [lookup(number, ["0xa"], 300), "broken"])
    (tmp_path / "other.jsonl").write_text("not a log")
    reader = LMCacheReader(tmp_path, skip_broken=True)
    assert [one.arrival_ms for one in reader] == [1000.0, 2000.0]
    assert reader.num_broken == 2
    assert "lookup_hashes_1.jsonl:2: " in reader.first_broken


@pytest.mark.parametrize("copy", [".gz", ".xz", ".bak", "~", ".orig", ".gz~", ".swp"])
@pytest.mark.parametrize("source_format", ["lmcache", "kv-cache-tester", "dynamo"])
def test_copies_in_a_folder_are_not_read_and_noted(tmp_path, source_format, copy):
    """`gzip -k` and editors leave copies; each was a log of its own."""
    session = {"id": "s", "block_size": 4, "requests": [{"t": 0.0, "in": 9, "out": 1, "hash_ids": [1, 2]}]}
    make, name, content = {
        "lmcache": (LMCacheReader, "lookup_hashes_1.jsonl", lookup(1.0, ["0xa"], 300)),
        "kv-cache-tester": (KVCacheTesterReader, "trace_0001.json", session),
        "dynamo": (DynamoReader, "trace.000000.jsonl", RECORD),
    }[source_format]
    text = (json.dumps(content) + "\n").encode()
    compress = {".gz": gzip.compress, ".xz": lzma.compress}.get(copy, bytes)
    (tmp_path / name).write_bytes(text)
    (tmp_path / f"{name}{copy}").write_bytes(compress(text))
    reader = make(tmp_path)
    assert len(list(reader)) == 1
    assert reader.notes == [f"not read: {tmp_path / name}{copy}, a copy by its name"]
    (tmp_path / name).unlink()
    if copy in (".gz", ".xz"):
        assert len(list(make(tmp_path))) == 1
    else:
        with pytest.raises(TraceError, match="the folder has no files"):
            make(tmp_path)


# ---- Dynamo ------------------------------------------------------------------------------------

RECORD = {
    "schema": "dynamo.agent.trace.v1",
    "event_type": "request_end",
    "event_time_unix_ms": 1777312801000,
    "event_source": "dynamo",
    "agent_context": {
        "session_type_id": "deep_research",
        "session_id": "research-run-42",
        "trajectory_id": "research-run-42:researcher",
    },
    "request": {
        "request_id": "dynamo-request-id",
        "model": "my-model",
        "output_tokens": 16,
        "replay": {
            "trace_block_size": 64,
            "input_length": 128,
            "input_sequence_hashes": [14879255164371896291, 274632075616497421],
        },
    },
}


def read_dynamo(tmp_path, lines, **options):
    return list(DynamoReader(write_trace(tmp_path / "log.jsonl", lines), **options))


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_request_records_are_read(tmp_path, is_wrapped):
    line = {"timestamp": 1234, "event": RECORD} if is_wrapped else RECORD
    (one,) = read_dynamo(tmp_path, [line])
    assert one.arrival_ms == 1777312801000.0
    assert (one.input_length, one.output_length) == (128, 16)
    assert one.hash_ids == [14879255164371896291, 274632075616497421]
    assert one.session_id == "research-run-42:researcher"


def test_arrival_is_found_in_three_ways(tmp_path):
    timed = {**RECORD, "request": RECORD["request"] | {"total_time_ms": 400.0}}
    received = {**RECORD, "request": timed["request"] | {"request_received_ms": 7}}
    found = [one.arrival_ms for one in read_dynamo(tmp_path, [RECORD, timed, received])]
    assert found == [1777312801000.0, 1777312800600.0, 7.0]


def test_absent_fields_of_records_may_be_null(tmp_path):
    line = {**RECORD, "event_time_unix_ms": None, "agent_context": None, "event": None, "hash_ids": None}
    (one,) = read_dynamo(tmp_path, [line])
    assert (one.arrival_ms, one.session_id) == (0.0, None)
    nulls = dict.fromkeys(("timestamp", "delay", "output_length", "session_id", "wait_for", "dependencies"))
    (one,) = read_dynamo(tmp_path, [{**nulls, "input_length": 8, "hash_ids": [1]}], block_size=8)
    assert (one.arrival_ms, one.output_length, one.session_id) == (0.0, 0, None)


def test_other_events_are_passed_over(tmp_path):
    tool = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "tool": {"tool_call_id": "x"}}
    assert len(read_dynamo(tmp_path, [tool, RECORD, tool])) == 1


def test_negative_hashes_are_their_unsigned_numbers(tmp_path):
    replay = {"trace_block_size": 8, "input_length": 8, "input_sequence_hashes": [-1]}
    (one,) = read_dynamo(tmp_path, [{**RECORD, "request": {"replay": replay}}])
    assert one.hash_ids == [2**64 - 1]


def test_mooncake_rows_may_have_delays(tmp_path):
    lines = [
        {"session_id": "a", "timestamp": 1000, "input_length": 9, "output_length": 2, "hash_ids": [1, 2]},
        {"session_id": "b", "created_time": 1500, "output_length": 2, "hash_ids": [1]},
        {"session_id": "a", "delay_ms": 50, "output_length": 2, "hash_ids": [1, 2, 3]},
        {"session_id": "a", "delay": 20, "output_length": 2, "hash_ids": [1, 2, 3]},
    ]
    found = read_dynamo(tmp_path, lines, block_size=8)
    assert [one.arrival_ms for one in found] == [1000, 1500, 1050, 1070]
    assert [one.input_length for one in found] == [9, 8, 24, 24]
    with pytest.raises(TraceError, match=r"log\.jsonl:1: .*give --trace-block-size"):
        read_dynamo(tmp_path, lines)


NAMES = {"timestamp": "created_time", "input_length": "input_tokens", "output_length": "output_tokens"}


@pytest.mark.parametrize("renamed", [[], list(NAMES), *([name] for name in NAMES)], ids=str)
def test_mooncake_rows_may_have_the_other_names_of_their_fields(tmp_path, renamed):
    """`input_tokens` and `output_tokens` were ignored: 900 and 300 became 1024 and 0."""
    rows = [
        {"timestamp": 0.5, "input_length": 900, "output_length": 300, "hash_ids": [1, 2]},
        {"timestamp": 12.5, "input_length": 600, "output_length": 7, "hash_ids": [1, 3]},
    ]
    lines = [{NAMES[key] if key in renamed else key: value for key, value in row.items()} for row in rows]
    found = read_dynamo(tmp_path, lines, block_size=512)
    assert [(one.arrival_ms, one.input_length, one.output_length) for one in found] == [
        (0.5, 900, 300),
        (12.5, 600, 7),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"input_length": 9, "input_tokens": 10},
        {"output_length": 1, "output_tokens": 2},
        {"timestamp": 1, "created_time": 2},
        {"delay": 1, "delay_ms": 2},
    ],
    ids=str,
)
def test_two_names_of_one_field_must_agree(tmp_path, fields):
    with pytest.raises(TraceError, match=r"log\.jsonl:1: .* they are names of one field"):
        read_dynamo(tmp_path, [{"input_length": 9, "hash_ids": [1, 2], **fields}], block_size=8)
    read_dynamo(tmp_path, [{"input_length": 9, "hash_ids": [1, 2], **dict.fromkeys(fields, 9)}], block_size=8)


def row(request_id, **fields):
    return {"request_id": request_id, "input_length": 8, "output_length": 2, "hash_ids": [1], **fields}


def test_rows_of_agents_wait_for_others(tmp_path):
    """`wait_for` and `tool_wait_ms` were ignored, and such rows arrived at 0."""
    lines = [
        row("a", timestamp=1000),
        row("b", wait_for=["a"], delay=5, tool_wait_ms=20),
        row("c", wait_for=["late", "a"], tool_wait_ms=7),
        row("d", wait_for=["a"], timestamp=9000, delay=5),
        row("late", wait_for=["b"], delay_ms=100, session_id="s"),
        row(None, session_id="s", tool_wait_ms=3),
        row("e", wait_for=[]),
    ]
    found = read_dynamo(tmp_path, lines, block_size=8)
    assert {one.line: one.arrival_ms for one in found} == {
        1: 1000,
        2: 1025,
        3: 1132,
        4: 9000,
        5: 1125,
        6: 1128,
        7: 0,
    }


def test_rows_that_wait_in_vain_are_broken(tmp_path):
    lines = [row("a"), row("b", wait_for=["nobody"]), row("c", wait_for=["d"]), row("d", wait_for=["c"])]
    path = write_trace(tmp_path / "log.jsonl", lines)
    with pytest.raises(
        TraceError, match=r"log\.jsonl:2: the row waits for 'nobody', which is not in the input"
    ):
        list(DynamoReader(path, block_size=8))
    reader = DynamoReader(path, skip_broken=True, block_size=8)
    assert [one.line for one in reader] == [1]
    assert reader.num_broken == 3


HEADER = {
    "schema": "dynamo.agentic_mooncake",
    "version": 2,
    "block_size": 8,
    "hash_id_scope": "local",
    "source": {"format": "weka", "digest": "x"},
}


def play_row(request_id, play_id, ids, not_before_ms=0.0, needed=(), **fields):
    names = ("request_id", "trigger", "delay_ms", "relation")
    return {
        "request_id": request_id,
        "play_id": play_id,
        "session_id": f"{play_id}:root",
        "model": "m",
        "input_length": 8 * len(ids),
        "output_length": 1,
        "hash_ids": ids,
        "not_before_ms": not_before_ms,
        "dependencies": [dict(zip(names, one, strict=True)) for one in needed],
        **fields,
    }


def test_rows_of_version_2_have_ids_of_their_play(tmp_path):
    lines = [
        HEADER,
        play_row("1", "p", [1, 2], 50.0, recorded_api_time_ms=400.0),
        play_row("2", "p", [1, 2, 3], needed=[("1", "completion", 30.0, "sequence")]),
        play_row(
            "3", "p", [1, 4], needed=[("1", "dispatch", 20.0, "spawn"), ("4", "completion", 0.0, "join")]
        ),
        play_row("4", "q", [1, 2], 100.0),
    ]
    found = {one.line - 1: one for one in read_dynamo(tmp_path, lines)}
    assert {line: one.arrival_ms for line, one in found.items()} == {1: 50, 2: 480, 3: 100, 4: 100}
    assert found[2].hash_ids[:2] == found[1].hash_ids
    assert found[3].hash_ids[0] == found[1].hash_ids[0]
    assert not set(found[4].hash_ids) & set(found[1].hash_ids)
    with pytest.raises(TraceError, match=r"log\.jsonl:1: .*is 8 tokens, that of earlier requests 16"):
        read_dynamo(tmp_path, lines, block_size=16)
    with pytest.raises(TraceError, match=r"log\.jsonl:1: the version of dynamo.agentic_mooncake is 3"):
        read_dynamo(tmp_path, [HEADER | {"version": 3}])


def test_shards_of_a_folder_are_one_trace(tmp_path):
    for number in (1, 0):
        request = RECORD["request"] | {"request_received_ms": 100 * number}
        name = f"trace.00000{number}.jsonl.gz"
        (tmp_path / name).write_bytes(gzip.compress(json.dumps({**RECORD, "request": request}).encode()))
    (tmp_path / "notes.txt").write_text("not a shard")
    reader = DynamoReader(tmp_path)
    assert [one.arrival_ms for one in reader] == [0, 100]


# ---- vLLM --------------------------------------------------------------------------------------

START = "(APIServer pid=7) {level} 11-23 18:30:0{second} [request_logger.py:52] "


def log(second, message, level="DEBUG"):
    return START.format(level=level, second=second) + message


def read_vllm(tmp_path, lines):
    return list(VLLMLogReader(write_trace(tmp_path / "log.jsonl", lines)))


def details(name, tokens, prompt="'Hello'"):
    return f"Request {name} details: prompt: {prompt}, prompt_token_ids: {tokens}, prompt_embeds shape: None."


def test_requests_and_their_outputs_are_read(tmp_path):
    lines = [
        "INFO 11-23 18:29:59 [api_server.py:1] Started server process [7]",
        log(1, details("cmpl-1", [1, 2, 3])),
        log(1, "Received request cmpl-1: params: SamplingParams(n=1), lora_request: None.", "INFO"),
        log(2, details("cmpl-2", [1])),
        log(3, "Generated response cmpl-2 details: output_token_ids: [4, 5]"),
        log(3, "Generated response cmpl-2: output: 'ab', finish_reason: stop", "INFO"),
        log(4, "Generated response cmpl-1 (streaming delta) details: output_token_ids: [7]"),
        log(5, "Generated response cmpl-1 (streaming delta) details: output_token_ids: [8, 9]"),
        log(6, "Generated response cmpl-3 details: output_token_ids: None"),
        "Traceback (most recent call last):",
    ]
    first, second = read_vllm(tmp_path, lines)
    assert (first.line, first.token_ids, first.output_length) == (2, [1, 2, 3], 3)
    assert (second.token_ids, second.output_length) == ([1], 2)
    assert second.arrival_ms - first.arrival_ms == 1000.0


def test_complete_stream_replaces_its_deltas(tmp_path):
    lines = [
        log(1, details("a", [1])),
        log(2, "Generated response a (streaming delta) details: output_token_ids: [7]"),
        log(3, "Generated response a (streaming complete) details: output_token_ids: [7, 8]"),
    ]
    assert [one.output_length for one in read_vllm(tmp_path, lines)] == [2]


def test_older_messages_are_read(tmp_path):
    line = (
        "INFO 06-12 12:34:56 [logger.py:42] Received request cmpl-9: prompt: 'x', params: SamplingParams(n=1)"
        ", prompt_token_ids: [5, 6], prompt_embeds shape: None, lora_request: None, prompt_adapter_request: "
        "None."
    )
    assert [one.token_ids for one in read_vllm(tmp_path, [line])] == [[5, 6]]


def test_text_of_users_is_not_read_as_a_message(tmp_path):
    text = (
        "Generated response a details: output_token_ids: [1, 1, 1] prompt_token_ids: [9] Request b details: "
    )
    lines = [
        log(1, details("a", [1, 2], prompt=repr(text))),
        log(2, f"Generated response a: output: {details('c', [3])!r}, finish_reason: stop", "INFO"),
        log(3, f"Request a JSON body: {json.dumps({'prompt': details('d', [4])})}", "INFO"),
    ]
    (one,) = read_vllm(tmp_path, lines)
    assert (one.token_ids, one.output_length) == ([1, 2], 0)


def test_json_lines_have_years_and_milliseconds(tmp_path):
    lines = [
        {"asctime": f"2026-11-23 18:30:01,{ms}", "levelname": "DEBUG", "message": details(str(ms), [1])}
        for ms in (123, 623)
    ]
    first, second = read_vllm(tmp_path, lines)
    assert second.arrival_ms - first.arrival_ms == 500.0


def test_log_may_pass_a_new_year(tmp_path):
    lines = [
        f"DEBUG {day} [x.py:1] {details(day[:5], [1])}"
        for day in ("12-31 23:59:59", "01-01 00:00:01", "02-29 00:00:00")
    ]
    found = [one.arrival_ms for one in read_vllm(tmp_path, lines)]
    assert found[1] - found[0] == 2000.0
    assert found == sorted(found)


def generated(name, tokens, more=""):
    return f"Generated response {name}{more} details: output_token_ids: {tokens}"


def make_messages(text):
    """Return messages: `?a` asks as request a, `!a2` is a response of 2 tokens to it, `+a2` a part of one."""
    makers = {
        "?": lambda name, _: details(name, [1]),
        "!": lambda name, count: generated(name, [4] * count),
        "+": lambda name, count: generated(name, [4] * count, " (streaming delta)"),
        "=": lambda name, _: f"Received request {name}: prompt: 'x', prompt_token_ids: [1]",
    }
    return [makers[one[0]](one[1], int(one[2:] or 0)) for one in text.split()]


@pytest.mark.parametrize(
    ("messages", "output_lengths"),
    [
        ("?a !a2 ?a !a3", [2, 3]),
        ("?a !a2 ?a", [2, 0]),
        ("?a ?b +a1 +b3 +a1 ?a +a1", [2, 3, 1]),
        ("!a2 ?a !a1", [1]),
        ("?a !a2 =a", [2, 0]),
    ],
)
def test_responses_belong_to_the_request_before_them(tmp_path, messages, output_lengths):
    """An id that occurs again used to give all its requests the outputs of the last one."""
    found = read_vllm(tmp_path, [log(1, one) for one in make_messages(messages)])
    assert [one.output_length for one in found] == output_lengths


FOREIGN = [
    "{",
    "{}",
    '  "model": "m",',
    "}",
    '{"ts": 1, "message": null}',
    '{"message": {"text": "Request a details: prompt: "}, "asctime": 3}',
    '{"level": "info", "msg": "GET /health 200"}',
    '{"message": "cut',
    "[1, 2",
    b"INFO 11-23 18:30:00 \xf0\x9f",
    b"\x00\xff\xfe",
]


@pytest.mark.parametrize("number", range(len(FOREIGN)))
def test_foreign_lines_in_a_log_are_passed_over(tmp_path, number):
    lines = [log(1, details("a", [1])), FOREIGN[number], log(1, generated("a", [4]))]
    (found,) = read_vllm(tmp_path, lines)
    assert found.output_length == 1


def test_prompt_with_a_cut_character_is_read(tmp_path):
    line = log(1, details("a", [1, 2], prompt="'?'")).encode().replace(b"?", b"\xe4\xbd")
    assert [one.token_ids for one in read_vllm(tmp_path, [line])] == [[1, 2]]
