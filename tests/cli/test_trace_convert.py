"""`kv-pool trace convert`: what is written, and what is lost."""

import pytest
from cli.kv_pool_command import kv_pool_command
from lab.made_trace import record, write_trace

from kv_pool.lab.trace import Trace


@pytest.fixture
def folder(tmp_path):
    write_trace(tmp_path / "trace.gz", [record(24, [7, 8, 9], 5, 100), record(16, [7, 5], 2, 900)])
    return tmp_path


def convert(folder, *arguments):
    done = kv_pool_command("trace", "convert", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_losses_are_printed(folder):
    size = ("--trace-block-size", "8")
    lines = convert(folder, "trace.gz", "--from", "mooncake", "--to", "lmcache", "-o", "log.jsonl", *size)
    assert lines[0] == "log.jsonl: 2 requests, 8 tokens per hash id"
    assert "lost in lmcache: generated tokens, sessions and tenants" in lines
    lines = convert(folder, "log.jsonl", "--from", "lmcache", "-o", "again.jsonl")
    assert "not in lmcache: sessions: the log has none" in lines
    again = list(Trace(folder / "again.jsonl", block_size=8))
    assert [(one.arrival_ms, one.hash_ids) for one in again] == [(0.0, [0, 1, 2]), (800.0, [0, 3])]


def test_skipped_lines_are_counted(folder):
    write_trace(folder / "log.jsonl", ["broken", '{"kind": "stored", "block_hashes": [1], "block_size": 8}'])
    lines = convert(folder, "log.jsonl", "--from", "events", "-o", "out.jsonl", "--skip-broken")
    assert lines[1].startswith("skipped: 1 broken lines; the first: log.jsonl:1: ")
