"""Traces are written line by line, compressed by suffix, and appear when they are complete."""

import os

import pytest
from lab.made_trace import COMPRESS, record

from kv_pool import TraceError
from kv_pool.lab.trace import Trace
from kv_pool.lab.trace_writer import open_trace_writer

LINES = [record(24, [1, 2, 3], 5, 0, session_id="a"), record(17, [1, 2, 4], 0, 20, session_id="b")]


def write(path, lines=LINES):
    with open_trace_writer(str(path)) as write_line:
        for line in lines:
            write_line(line)
    return path


@pytest.mark.parametrize("suffix", COMPRESS)
def test_written_trace_is_read_again(tmp_path, suffix):
    path = write(tmp_path / f"trace{suffix}")
    assert [one.hash_ids for one in Trace(path, block_size=8)] == [[1, 2, 3], [1, 2, 4]]
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_equal_lines_give_equal_bytes(tmp_path, suffix):
    one = write(tmp_path / f"one{suffix}").read_bytes()
    os.utime(tmp_path, (0, 0))
    assert one == write(tmp_path / f"other{suffix}").read_bytes()


def test_file_is_unchanged_until_the_trace_is_complete(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("before")

    def fail():
        yield LINES[0]
        assert path.read_text() == "before"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(path, fail())
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["trace.jsonl"]


def test_devices_are_written_directly():
    write("/dev/null")
    with pytest.raises(TraceError, match="/dev/full: cannot write the trace: No space left"):
        write("/dev/full", LINES * 1000)
    assert os.path.exists("/dev/full")


def test_missing_folder_is_an_error(tmp_path):
    with pytest.raises(TraceError, match="cannot write the trace: there is no folder"):
        write(tmp_path / "nowhere" / "trace.jsonl")
