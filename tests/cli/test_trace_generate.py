"""`kv-pool trace generate`: a trace from a seed."""

import json

import pytest
from cli.kv_pool_command import kv_pool_command

from kv_pool.lab.trace import Trace


@pytest.mark.parametrize("kind", ["chat", "agent", "rag"])
def test_workload_is_written_and_counted(tmp_path, kind):
    done = kv_pool_command(
        *("trace", "generate", kind, "--requests", "40", "--seed", "3", "-o", "made.gz"),
        *("--max-tokens", "30000", "--block-size", "32"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    requests = list(Trace(tmp_path / "made.gz"))
    num_tokens = sum(one.input_length for one in requests)
    num_ids = sum(len(one.hash_ids) for one in requests)
    assert done.stdout == f"made.gz: 40 requests, {num_tokens:,} prompt tokens, {num_ids:,} hash ids\n"
    assert all(one.session_id is not None for one in requests)


def test_distributions_are_options(tmp_path):
    done = kv_pool_command(
        *("trace", "generate", "chat", "--requests", "9", "-o", "made.jsonl", "--turns", "fixed:3"),
        *("--first-tokens", "fixed:100", "--message-tokens", "fixed:10", "--output-tokens", "fixed:5"),
        *("--system-tokens", "fixed:20", "--think-time", "fixed:0.5", "--sessions-per-s", "0.1"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    first = [line for line in lines if line["session_id"] == 0]
    assert [line["input_length"] for line in first] == [120, 135, 150]
    assert [line["output_length"] for line in first] == [5, 5, 5]
    assert [line["timestamp"] for line in first] == [0, 500, 1000]
