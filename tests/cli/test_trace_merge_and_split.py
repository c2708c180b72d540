"""`kv-pool trace merge` and `split`: tenants of traces, and the traces again."""

import pytest
from cli.kv_pool_command import kv_pool_command
from lab.made_trace import record, write_trace

from kv_pool.lab.trace import Trace


@pytest.fixture
def folder(tmp_path):
    write_trace(tmp_path / "a.jsonl", [record(24, [1, 2, 3], 5, 0, session_id=1), record(16, [1, 2], 0, 20)])
    write_trace(tmp_path / "b.gz", [record(24, [1, 2, 3], 5, 10, session_id=1)])
    return tmp_path


def trace(folder, *arguments):
    done = kv_pool_command("trace", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_merged_traces_can_be_split_again(folder):
    size = ("--trace-block-size", "8")
    assert trace(folder, "merge", "a.jsonl", "b.gz", "-o", "m.xz", *size) == "m.xz: 2 tenants\n"
    merged = list(Trace(folder / "m.xz", block_size=8))
    assert [one.tenant for one in merged] == ["a", "b", "a"]
    assert [one.session_id for one in merged] == ["a/1", "b/1", None]
    assert not set(merged[0].hash_ids) & set(merged[1].hash_ids)
    stdout = trace(folder, "split", "m.xz", "--by", "tenant", "-o", "again-{part}.jsonl", *size)
    assert stdout == "2 files, 3 requests; --trace-block-size 8\n"
    for name in ("a.jsonl", "b.gz"):
        again = folder / f"again-{name[0]}.jsonl"
        assert list(Trace(again, block_size=8)) == list(Trace(folder / name, block_size=8))


def test_names_and_shared_ids_are_options(folder):
    options = ("--names", "x, y", "--shared", "--trace-block-size", "8")
    trace(folder, "merge", "a.jsonl", "b.gz", "-o", "m.jsonl", *options)
    merged = list(Trace(folder / "m.jsonl", block_size=8))
    assert [one.tenant for one in merged] == ["x", "y", "x"]
    assert merged[0].hash_ids == merged[1].hash_ids
