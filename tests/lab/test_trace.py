"""Tests of reading traces: compressions, kinds of records, broken lines and limits."""

import base64
import gzip
import hashlib
import json
import lzma
import random
import re
import tracemalloc

import pytest
from backports import zstd
from lab.made_trace import COMPRESS, record, write_trace

from kv_pool import InvalidArgumentError, TraceError
from kv_pool.lab.line_reader import LineReader
from kv_pool.lab.trace import Trace, TraceRequest, find_trace
from kv_pool.shared_options import BUNDLED_TRACES

MOONCAKE_STYLE = [
    record(6758, list(range(14)), 500),
    record(1024, [0, 20], 490, 27_000),
    record(513, [0, 21], 7, 27_000),
]
GOOD = record(600, [1, 2], 3, 4)


def read_all(path, **options):
    return list(Trace(path, **options))


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "trace.data"])
@pytest.mark.parametrize("suffix", COMPRESS)
def test_content_and_not_the_name_determines_the_compression(tmp_path, suffix, name):
    path = write_trace(tmp_path / f"trace{suffix}", MOONCAKE_STYLE)
    path = path.rename(tmp_path / (name or path.name))
    assert read_all(path) == [
        TraceRequest(1, 0.0, 6758, 500, list(range(14)), None),
        TraceRequest(2, 27_000.0, 1024, 490, [0, 20], None),
        TraceRequest(3, 27_000.0, 513, 7, [0, 21], None),
    ]


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstd.compress)]
)
def test_concatenated_compressed_streams_are_read(tmp_path, suffix, compress):
    pieces = [write_trace(tmp_path / "piece.jsonl", [line]).read_bytes() for line in MOONCAKE_STYLE]
    path = tmp_path / f"trace{suffix}"
    path.write_bytes(b"".join(compress(piece) for piece in pieces))
    assert [request.input_length for request in Trace(path)] == [6758, 1024, 513]


def test_each_iteration_starts_from_the_beginning(tmp_path):
    trace = Trace(write_trace(tmp_path / "trace.gz", MOONCAKE_STYLE))
    assert list(trace) == list(trace)
    assert len(list(trace)) == 3


def test_position_ends_at_one(tmp_path):
    trace = Trace(write_trace(tmp_path / "trace.jsonl", MOONCAKE_STYLE), block_size=512)
    positions = []
    for _ in trace:
        positions.append(trace.position)
    assert positions == sorted(positions)
    assert 0 < positions[0] <= 1
    assert trace.position == 1.0


def test_digest_is_the_sha256_of_the_stored_file(tmp_path):
    path = write_trace(tmp_path / "trace.gz", MOONCAKE_STYLE)
    assert Trace(path).digest() == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", BUNDLED_TRACES)
def test_bundled_traces_are_found_by_name(name):
    assert find_trace(name).is_file()
    assert find_trace(name).name == BUNDLED_TRACES[name]


def test_missing_file_error_names_bundled_traces(tmp_path):
    with pytest.raises(TraceError, match=r"nowhere\.jsonl: no such file; .*mooncake_conversation"):
        Trace(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("lines", [[], ["", "   "]], ids=["no lines", "blank lines"])
def test_trace_without_requests_raises(tmp_path, suffix, lines):
    path = write_trace(tmp_path / f"trace{suffix}", lines)
    with pytest.raises(TraceError, match=f"trace{suffix}: the file contains no request$"):
        Trace(path)


# ---- records -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "request_"),
    [
        ({"token_ids": [5, 6, 7], "output_length": 2}, TraceRequest(1, 0.0, 3, 2, None, [5, 6, 7])),
        ({"prompt_token_ids": [5, 6, 7]}, TraceRequest(1, 0.0, 3, 0, None, [5, 6, 7])),
        ({"token_ids": [0, 2**64 - 1]}, TraceRequest(1, 0.0, 2, 0, None, [0, 2**64 - 1])),
        (record(16, [0, 2**64 - 1]), TraceRequest(1, 0.0, 16, 0, [0, 2**64 - 1], None)),
        (record(8, [1], timestamp=1.25), TraceRequest(1, 1.25, 8, 0, [1], None)),
        ({"input_length": 8, "hash_ids": [1]}, TraceRequest(1, 0.0, 8, 0, [1], None)),
    ],
)
def test_records_have_token_ids_or_hash_ids(tmp_path, line, request_):
    path = write_trace(tmp_path / "trace.jsonl", [line])
    assert read_all(path, block_size=8) == [request_]
    if request_.hash_ids is None:
        assert Trace(path).block_size is None


def test_unknown_fields_are_ignored(tmp_path):
    extra = {"user": 7, "model": {"name": "kimi"}, "turns": [1, [2]], "note": None}
    plain = write_trace(tmp_path / "plain.jsonl", [GOOD])
    decorated = write_trace(tmp_path / "decorated.jsonl", [{**extra, **GOOD}])
    assert read_all(decorated, block_size=512) == read_all(plain, block_size=512)


def test_blank_lines_are_skipped_but_numbered(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", ["", GOOD, "  \t", "\r", GOOD])
    trace = Trace(path, block_size=512)
    assert [request.line for request in trace] == [2, 5]
    assert trace.num_broken == 0


def test_trace_is_read_line_by_line(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [GOOD, "not json", "\x00\x01"])
    requests = iter(Trace(path, block_size=512))
    assert next(requests).input_length == 600
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: "):
        next(requests)


def test_inference_does_not_read_the_whole_file(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [record(6758, list(range(14)))] * 1000 + ["not json"])
    trace = Trace(path)
    assert trace.block_size == 512
    with pytest.raises(TraceError, match=r"trace\.jsonl:1001: "):
        list(trace)


# ---- block size --------------------------------------------------------------------------------


def test_block_size_is_inferred_with_partial_ids(tmp_path):
    assert Trace(write_trace(tmp_path / "trace.jsonl", MOONCAKE_STYLE)).block_size == 512


def test_block_size_is_inferred_without_partial_ids(tmp_path):
    lines = [record(length, list(range(length // 64))) for length in (1000, 2001, 130, 63)]
    assert Trace(write_trace(tmp_path / "trace.jsonl", lines)).block_size == 64


def test_ambiguous_block_size_raises(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [record(512, [1])])
    with pytest.raises(TraceError, match=r"512, 1024, 2048, 4096 would fit.*--trace-block-size"):
        Trace(path)


def test_contradictory_lines_raise(tmp_path):
    path = write_trace(
        tmp_path / "trace.jsonl", [record(6758, list(range(14))), record(6758, list(range(423)))]
    )
    with pytest.raises(TraceError, match=r"first 2 requests.*no power of two.*--trace-block-size"):
        Trace(path)


def test_given_block_size_is_not_inferred(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [record(100, list(range(34)))])
    trace = Trace(path, block_size=3)
    assert trace.block_size == 3
    assert len(next(iter(trace)).hash_ids) == 34


# ---- broken lines ------------------------------------------------------------------------------

BROKEN = {
    "bad JSON": ('{"timestamp": 0, "input_length": 6', "truncated"),
    "not an object": ("[1, 2, 3]", "Expected `object`"),
    "not text": (b"\xff\xfe\x00\x01", "JSON is malformed"),
    "neither kind of ids": ({"timestamp": 0, "input_length": 600}, "either hash_ids or token_ids"),
    "both kinds of ids": (record(2, [1, 2], token_ids=[1, 2]), "either hash_ids or token_ids"),
    "no input_length": ({"timestamp": 0, "hash_ids": [1, 2]}, "needs its input_length"),
    "too few ids": (record(1600, [1, 2]), r"1600 tokens are 3\.12 blocks .* there are 2 ids of blocks"),
    "too many ids": (record(600, [1, 2, 3]), r"600 tokens are 1\.17 blocks .* there are 3 ids of blocks"),
    "input_length of other tokens": (
        {"input_length": 4, "token_ids": [1, 2, 3]},
        "input_length is 4 but there are 3 token ids",
    ),
    "negative hash id": (record(600, [1, -2]), "a hash id is not in 0"),
    "oversized hash id": (record(600, [1, 2**64]), "a hash id is not in 0"),
    "negative token id": ({"token_ids": [1, -2]}, "a token id is not in 0"),
    "oversized token id": ({"token_ids": [1, 2**64]}, "a token id is not in 0"),
    "id of another type": (record(600, [1, "two"]), "Expected `int`"),
    "negative timestamp": (record(600, [1, 2], 0, -1), "the arrival is -1 ms"),
    "endless timestamp": ('{"timestamp": 1e999, "input_length": 600, "hash_ids": [1, 2]}', ""),
    "negative output_length": (record(600, [1, 2], -5), "the output has -5 tokens"),
    "empty prompt": (record(0, []), "the prompt has 0 tokens"),
    "empty token_ids": ({"token_ids": []}, "the prompt has 0 tokens"),
    "nested lists": ('{"input_length": 600, "more": ' + "[" * 10**5 + "]" * 10**5 + "}", "recursion depth"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_line_error_has_file_and_line(tmp_path, kind):
    line, why = BROKEN[kind]
    path = write_trace(tmp_path / "trace.jsonl", [GOOD, "", line, GOOD])
    requests = iter(Trace(path, block_size=512))
    assert next(requests).line == 1
    with pytest.raises(TraceError, match=rf"trace\.jsonl:3: .*{why}") as caught:
        next(requests)
    assert str(caught.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_lines_can_be_skipped_and_are_counted(tmp_path, kind):
    line, _ = BROKEN[kind]
    path = write_trace(tmp_path / "trace.gz", [line, GOOD, line, GOOD, line])
    trace = Trace(path, block_size=512, skip_broken=True)
    for _ in range(2):
        assert [request.line for request in trace] == [2, 4]
        assert trace.num_broken == 3
        assert trace.first_broken.startswith(f"{path}:1: ")


def test_inference_skips_broken_lines(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", ["not json", *MOONCAKE_STYLE])
    assert Trace(path, skip_broken=True).block_size == 512


def test_broken_line_stops_the_inference(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [*MOONCAKE_STYLE, "not json"])
    with pytest.raises(TraceError, match=r"trace\.jsonl:4: "):
        Trace(path)


def test_error_for_only_broken_lines_shows_the_first(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", ["PK\x03\x04", "\x00"])
    with pytest.raises(
        TraceError, match=r"the file contains no request; the first broken line: .*trace\.jsonl:1: "
    ):
        Trace(path, skip_broken=True)


def make_long_trace(path):
    """Write lines that compress badly, so that half of the file still contains whole lines."""
    lines = []
    for number in range(500):
        first = hashlib.sha256(str(number).encode()).digest()
        lines.append(record(16, [int.from_bytes(first[:8], "big"), number], number % 97, number))
    return write_trace(path, lines)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("skip_broken", [False, True])
def test_truncated_file_raises(tmp_path, suffix, skip_broken):
    path = make_long_trace(tmp_path / f"trace{suffix}")
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    with pytest.raises(TraceError, match=rf"trace{suffix}:\d+: cannot decompress"):
        read_all(path, block_size=8, skip_broken=skip_broken)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_damaged_compression_error_has_file_and_line(tmp_path, suffix):
    path = make_long_trace(tmp_path / f"trace{suffix}")
    whole = path.read_bytes()
    for place in range(20, len(whole), len(whole) // 12):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with pytest.raises(TraceError, match=rf"trace{suffix}:\d+: "):
            read_all(path, block_size=8)


# ---- limits ------------------------------------------------------------------------------------

LONG_LINE = b'{"input_length": 600, "hash_ids": [' + b"1, " * 10**6 + b"2]}"


XZ_WITH_A_DICTIONARY_OF_512_MIB = base64.b64decode(
    "/Td6WFoAAATm1rRGAgAhASIAAACCQKzcAQAkeyJpbnB1dF9sZW5ndGgiOiA4LCAiaGFzaF9p"
    "ZHMiOiBbMV19CgAAAACVr8UvDfoH2QABPSXSKWoBH7bzfQEAAAAABFla"
)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_too_long_line_is_broken_and_not_kept_in_memory(tmp_path, suffix):
    path = write_trace(tmp_path / f"trace{suffix}", [GOOD, LONG_LINE * 30, GOOD, LONG_LINE])
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=rf"trace{suffix}:2: the line has more than 100,000 bytes"):
            read_all(path, block_size=512, max_line_bytes=100_000)
        trace = Trace(path, block_size=512, max_line_bytes=100_000, skip_broken=True)
        assert [request.line for request in trace] == [1, 3]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert trace.num_broken == 2
    assert peak < len(LONG_LINE) * 30 / 4


def test_too_long_whole_file_is_read_to_the_limit_only(tmp_path):
    """The rest was decompressed, and read as further files where a line end was at the limit."""
    path = tmp_path / "one.gz"
    path.write_bytes(gzip.compress((b"x" * 100 + b"\n") * 1000))
    reader = LineReader(path, 100, 1000, skip_broken=True)
    assert list(reader.read(lambda text, number: text, is_whole=True)) == []
    assert reader.num_broken == 1
    assert reader.first_broken == f"{path}:1: the file has more than 100 bytes (max_line_bytes)"


@pytest.mark.parametrize("line_end", [b"", b"\n"])
def test_line_limit_excludes_the_line_end(tmp_path, line_end):
    line = json.dumps(GOOD).encode()
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line + line_end)
    assert len(read_all(path, block_size=512, max_line_bytes=len(line))) == 1
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: the line has more than"):
        Trace(path, block_size=512, max_line_bytes=len(line) - 1)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_decompression_bomb_raises(tmp_path, suffix):
    path = write_trace(tmp_path / f"trace{suffix}", [GOOD] * 1000)
    assert len(read_all(path, block_size=512, max_decompressed_bytes=80_000)) == 1000
    with pytest.raises(TraceError, match=r"trace.*:\d+: the decompressed file has more than 20,000"):
        read_all(path, block_size=512, max_decompressed_bytes=20_000, skip_broken=True)
    plain = write_trace(tmp_path / "trace.jsonl", [GOOD] * 1000)
    assert len(read_all(plain, block_size=512, max_decompressed_bytes=1)) == 1000


def test_xz_memory_is_limited(tmp_path):
    path = tmp_path / "trace.xz"
    path.write_bytes(XZ_WITH_A_DICTIONARY_OF_512_MIB)
    assert lzma.decompress(path.read_bytes()).startswith(b'{"input_length": 8')
    with pytest.raises(TraceError, match=r"trace\.xz:1: cannot decompress: Memory usage limit exceeded"):
        Trace(path)


@pytest.mark.parametrize("name", ["max_line_bytes", "max_decompressed_bytes"])
def test_limits_below_one_byte_are_refused(tmp_path, name):
    path = write_trace(tmp_path / "trace.jsonl", [GOOD])
    with pytest.raises(InvalidArgumentError, match=f"{name} is 0"):
        Trace(path, **{name: 0})


# ---- units of time -------------------------------------------------------------------------------


@pytest.mark.parametrize(("unit", "factor"), [("ns", 10**6), ("us", 1000), ("ms", 1), ("s", 0.001)])
def test_timestamps_may_have_any_unit(tmp_path, unit, factor):
    lines = [record(8, [1], timestamp=1000 * number * factor) for number in range(3)]
    path = write_trace(tmp_path / "trace.jsonl", lines)
    arrivals = [request.arrival_ms for request in read_all(path, block_size=8, timestamp_unit=unit)]
    assert arrivals == pytest.approx([0, 1000, 2000])


@pytest.mark.parametrize(
    ("timestamps", "unit", "message"),
    [
        ([0.0, 1.5, 61.114], "ms", "the first 3 requests arrive within 0.0611 s; if .* --time-unit s"),
        ([0, 1, 2, 3], "ms", "the first 4 requests arrive within 0.003 s"),
        ([0.5, 30.25, 61.114], "ms", "--time-unit s"),
        ([0.0, 61.114], "ms", "--time-unit s"),
        ([0.0, 3600.5], "ms", "the first 2 requests arrive within 3.6 s"),
        (
            [1_790_000_000_000, 1_790_000_060_000],
            "ms",
            "begin at 1,790,000,000,000 ms, like times since",
        ),
        ([1_790_000_000, 1_790_000_060], "s", "like times since 1970; kv-pool trace convert"),
        (
            [1_790_000_000, 1_790_000_060],
            "ms",
            "like seconds since 1970; if .* --time-unit s",
        ),
        ([0.0, 1.5, 61.114], "s", None),
        ([0, 300, 600], "ms", None),
        ([0, 0, 0], "ms", None),
        ([0, 60_000.25, 86_400_000], "ms", None),
        ([5], "ms", None),
    ],
)
def test_timestamps_that_look_like_another_unit_are_a_warning(tmp_path, caplog, timestamps, unit, message):
    """Seconds were read as milliseconds, and times since 1970 as minute 29,833,333."""
    lines = [record(8, [1], timestamp=one) for one in timestamps]
    path = write_trace(tmp_path / "trace.jsonl", lines)
    for _ in range(2):
        trace = Trace(path, block_size=8, timestamp_unit=unit)
    assert len(list(trace)) == len(timestamps)
    assert len(caplog.messages) == (message is not None)  # once for each file
    if message is not None:
        assert re.search(message, caplog.messages[0])
        assert str(path) in caplog.messages[0]


# ---- files of other programs ---------------------------------------------------------------------


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("at", [0, 1])
def test_byte_order_marks_are_skipped(tmp_path, suffix, at):
    """The first line was malformed, or a request lost."""
    lines = [json.dumps(record(8, [number])).encode() for number in range(3)]
    lines[0] = b"\xef\xbb\xbf" + lines[0]
    lines[at] = b"\xef\xbb\xbf" + lines[at].removeprefix(b"\xef\xbb\xbf")  # as in files that were joined
    path = write_trace(tmp_path / f"trace{suffix}", lines)
    assert len(read_all(path, block_size=8)) == 3


@pytest.mark.parametrize("suffix", [suffix for suffix in COMPRESS if suffix != ".jsonl"])
def test_cut_file_is_named_with_the_line_of_the_cut(tmp_path, suffix):
    """It was line 1, whatever came before."""
    rng = random.Random(3)
    lines = [record(8, [rng.randrange(2**64)], session_id=rng.randbytes(40).hex()) for _ in range(5000)]
    path = write_trace(tmp_path / f"trace{suffix}", lines)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    trace = Trace(path, block_size=8)
    found = []
    with pytest.raises(TraceError, match="cannot decompress") as caught:
        found.extend(iter(trace))
    assert 1000 < len(found) < 4000
    assert f":{len(found) + 1}: " in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.68,374\n",
            "this is CSV, with the columns TIMESTAMP",
        ),
        (b"0.5,374,44\n", "this is CSV, .* --from csv reads lengths of prompts"),
        ('{"hash_ids": [1]}\n'.encode("utf-16"), "this is UTF-16 text; save it as UTF-8"),
        (b"PAR1\x15\x04", "this is a Parquet file"),
        (b"PK\x03\x04\x14", "this is a zip archive"),
    ],
)
def test_files_that_are_no_traces_are_named(tmp_path, content, message):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=rf"trace\.jsonl:1: {message}"):
        Trace(path)
    with pytest.raises(TraceError, match=rf"no request; the first broken line: .*{message}"):
        Trace(path, skip_broken=True)
