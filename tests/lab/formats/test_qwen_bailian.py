"""Qwen-Bailian's traces: seconds, conversations, and ids of a block's tokens alone."""

import pytest
from lab.made_trace import write_trace

from kv_pool import TraceError
from kv_pool.lab.formats.convert import ConvertSettings, convert_trace
from kv_pool.lab.formats.qwen_bailian import QwenBailianReader
from kv_pool.lab.trace import Trace


def chat(chat_id, parent, timestamp, hash_ids, **more):
    return {
        "chat_id": chat_id,
        "parent_chat_id": parent,
        "timestamp": timestamp,
        "input_length": 16 * len(hash_ids or [0]) - 3,
        "output_length": 132,
        "type": "text",
        "turn": 2,
        "hash_ids": hash_ids,
        **more,
    }


def read(tmp_path, lines, **options):
    return list(QwenBailianReader(write_trace(tmp_path / "qwen_blksz_16.jsonl", lines), **options))


def test_times_are_seconds_and_conversations_are_sessions(tmp_path):
    lines = [
        chat(55, -1, 0.5, [1, 2]),
        chat(159, 55, 61.114, [1, 2, 3]),
        chat(7, -1, 62, [1]),
        chat(160, 159, 63, [1, 2, 3, 4]),
        chat(161, 900, 64, [5]),
        chat(162, 161, 64, [5], output_length=None, turn=None),
    ]
    found = read(tmp_path, lines)
    assert [one.arrival_ms for one in found] == [500.0, 61_114.0, 62_000.0, 63_000.0, 64_000.0, 64_000.0]
    assert [one.session_id for one in found] == ["55", "55", "7", "55", "900", "900"]
    assert [one.output_length for one in found] == [132] * 5 + [0]
    assert found[1].hash_ids[:2] == found[0].hash_ids
    assert [one.arrival_ms for one in read(tmp_path, lines, timestamp_unit="ms")][1] == 61.114


def test_equal_blocks_behind_different_ones_are_different(tmp_path):
    one, other, repeated = read(
        tmp_path, [chat(1, -1, 0, [1, 2, 3]), chat(2, -1, 0, [9, 2, 3]), chat(3, -1, 0, [4, 4, 4])]
    )
    assert not set(one.hash_ids) & set(other.hash_ids)
    assert len(set(repeated.hash_ids)) == 3


def test_a_trace_is_converted(tmp_path):
    lines = [chat(1, -1, 0.0, [7, 8]), chat(2, 1, 10.25, [7, 8, 9]), chat(3, -1, 11, None)]
    path = write_trace(tmp_path / "qwen.jsonl", lines)
    report = convert_trace(ConvertSettings(str(path), "qwen-bailian"), str(tmp_path / "out.jsonl"))
    assert report.notes == (
        "only lengths are known of 1 requests: each has blocks of its own, and none is hit",
    )
    found = list(Trace(tmp_path / "out.jsonl", block_size=16))
    assert [(one.arrival_ms, one.hash_ids, one.session_id) for one in found] == [
        (0.0, [0, 1], "1"),
        (10_250.0, [0, 1, 2], "1"),
        (11_000.0, [3], "3"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        {},
        chat(1, -1, -1, [1]),
        chat(1, -1, 0, [1], input_length=100),
        chat(1, -1, 0, ["x"]),
    ],
)
def test_broken_lines_are_named(tmp_path, line):
    with pytest.raises(TraceError, match=r"qwen_blksz_16\.jsonl:2: "):
        read(tmp_path, [chat(1, -1, 0, [1]), line])
