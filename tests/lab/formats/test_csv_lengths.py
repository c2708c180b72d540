"""Tables of lengths, as Azure, BurstGPT and inference-perf have them."""

import pytest

from kv_pool import TraceError
from kv_pool.lab.formats.convert import ConvertSettings, convert_trace
from kv_pool.lab.formats.csv_lengths import CsvReader
from kv_pool.lab.trace import Trace
from kv_pool.lab.trace_info import describe_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:17:00,4808,10
"""
AZURE_2024 = (
    AZURE.replace("00,374", "00+00:00,374").replace("90,396", "90+00:00,396").replace("00,48", "00Z,48")
)
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,0,0,0,Conversation log
118,GPT-4,417,276,693,"API log, new"
"""
BURST_WITH_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens
5.5,a-b,2.1,ChatGPT,472,18
45,,,GPT-4,417,0
"""


def read(tmp_path, text, **options):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    reader = CsvReader(path, **options)
    return [(one.arrival_ms, one.input_length, one.output_length, one.session_id) for one in reader], reader


@pytest.mark.parametrize("text", [AZURE, AZURE.replace("\n", "\r\n"), AZURE_2024, AZURE.split("\n", 1)[1]])
def test_azure_is_read_with_and_without_a_header(tmp_path, text):
    found, _ = read(tmp_path, text)
    assert [one[1:] for one in found] == [(374, 44, None), (396, 109, None), (4808, 10, None)]
    assert [one[0] - found[0][0] for one in found] == pytest.approx([0, 4314.579, 73_319.41], abs=0.01)


def test_burstgpt_is_read_and_failed_requests_are_noted(tmp_path):
    found, reader = read(tmp_path, BURST)
    assert found == [(5000.0, 472, 18, None), (118_000.0, 417, 276, None)]
    assert reader.notes == ["not converted: 1 rows without a prompt token, those of failed requests"]
    found, reader = read(tmp_path, BURST_WITH_SESSIONS)
    assert found == [(5500.0, 472, 18, "a-b"), (45_000.0, 417, 0, None)]
    assert reader.notes == []


@pytest.mark.parametrize(
    ("header", "unit", "arrival_ms"),
    [
        ("num_prefill_tokens,num_decode_tokens,arrived_at", None, 7000.0),
        ("Prompt_Tokens,Completion Tokens,timestamp_ms", None, 7.0),
        ("input_length,output_length,time", "ms", 7.0),
        ("input_tokens,output_tokens,timestamp_ms", "s", 7000.0),
        ("promptTokens,outputLen,other", None, 0.0),
    ],
)
def test_columns_are_found_by_name(tmp_path, header, unit, arrival_ms):
    found, _ = read(tmp_path, f"\ufeff{header}\n12,3,7\n\n", timestamp_unit=unit)
    assert found == [(arrival_ms, 12, 3, None)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a,b,c\n1,2,3\n",
            r":1: no column has the tokens of prompts; the columns are a, b, c; name it ContextTokens, or ",
        ),
        (AZURE + "2023-11-16 18:17:00,many,1\n", r":5: "),
        (AZURE + "2023-11-16 18:17:00,1.5,1\n", r":5: '1.5' is no number of tokens"),
        (AZURE + "2023-11-16 18:17:00,-4,1\n", r":5: '-4' is no number of tokens"),
        (AZURE + "yesterday,4,1\n", r":5: "),
        (AZURE + "2023-11-16 18:17:00,1e999,1\n", r":5: "),
        (AZURE + "2023-11-16 18:17:00,150000000,1\n", r":5: the prompt has 150,000,000 tokens"),
        (AZURE + "2023-11-16 18:17:00,4,1e30\n", r":5: the output has"),
    ],
)
def test_broken_rows_are_named(tmp_path, text, message):
    with pytest.raises(TraceError, match=r"lengths\.csv" + message):
        read(tmp_path, text)


def test_lengths_become_blocks_that_nothing_hits(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text(AZURE)
    report = convert_trace(ConvertSettings(str(path), "csv"), str(tmp_path / "out.jsonl"))
    assert (report.num_requests, report.block_size) == (3, 16)
    assert report.notes == (
        "only lengths are known of 3 requests: each has blocks of its own, and none is hit",
    )
    info = describe_trace(Trace(tmp_path / "out.jsonl", block_size=16))
    assert (info.tokens_in, info.tokens_out, info.span_s) == (5578, 163, pytest.approx(73.31941))
    assert info.distinct_blocks == info.blocks_looked_up == 24 + 25 + 301
    convert_trace(ConvertSettings(str(path), "csv", block_size=512), str(tmp_path / "out.jsonl"))
    assert describe_trace(Trace(tmp_path / "out.jsonl", block_size=512)).distinct_blocks == 1 + 1 + 10
