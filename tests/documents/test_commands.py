"""The commands in the design of a KV pool by block ids, as written there, in the same order."""

import json
import re

import pytest
from cli.kv_pool_command import kv_pool_command
from cli.running_commands import serving
from lab.made_trace import record, write_trace

LATER_MS = 9_000_000_000


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    write_trace(tmp_path / "t.jsonl", [record(32, [1, 2], 8, 0), record(8, [9], 1, LATER_MS)])
    return tmp_path


def ask(folder, *arguments, **variables):
    return kv_pool_command(*arguments, cwd=folder, XDG_RUNTIME_DIR=str(folder), **variables)


SIZES = ("--kv-pool-size", "10000", "--kv-block-size", "16", "--trace-block-size", "16")


def test_serve_accepts_the_designs_options(folder):
    with serving("t.jsonl", *SIZES, "--enable-defragmentation", cwd=folder) as process:
        assert "a pool of 10,000 blocks of 16 tokens" in process.first_line
        shown = ask(folder, "stats").stdout
        assert shown.startswith("KV Pool Statistics:\n  Total Blocks: 10000")
        for pattern in (
            r"\n  Used Blocks: \d+ \(\d+\.\d%\)",
            r"\n  Free Blocks: \d+ \(\d+\.\d%\)",
            r"\n  Fragmentation Rate: \d+\.\d%",
            r"\n  Allocation Latency: (\d+\.\dµs \(avg\)|not known yet)",
        ):
            assert re.search(pattern, shown), shown
        done = ask(folder, "defrag").stdout
        assert done.startswith("Defragmentation complete:\n  Moved Blocks: ")
        assert re.search(r"\n  Time: \d+\.\dms", done)
        assert re.search(r"\n  Fragmentation Rate: \d+\.\d% → \d+\.\d%", done)


def test_compaction_accepts_the_designs_options(folder):
    options = ("--defrag-threshold", "0.2", "--defrag-interval", "60")
    with serving("t.jsonl", *SIZES, *options, cwd=folder) as process:
        assert "is served at" in process.first_line
    (folder / "pool.toml").write_text(
        "kv_pool_size = 300\nkv_block_size = 16\ntrace_block_size = 16\nenable_defragmentation = false\n"
    )
    with serving("t.jsonl", "--config", "pool.toml", "--kv-pool-size", "400", cwd=folder) as process:
        assert "a pool of 400 blocks of 16 tokens" in process.first_line


def test_lines_fit_80_columns(folder):
    with serving("t.jsonl", *SIZES, "--name", "gpu-node-1", cwd=folder) as process:
        process.stdout.readline()
        for command in (("stats",), ("defrag",), ("sequences",), ("migration-status",), ("peers",)):
            shown = ask(folder, *command, COLUMNS="80")
            assert shown.returncode == 0, shown.stderr
            assert max(map(len, shown.stdout.splitlines())) <= 80, shown.stdout


@pytest.mark.slow
def test_migration_status_names_the_whole_sequence(folder):
    write_trace(folder / "busy.jsonl", [record(64, [1, 2, 3, 4], 10_000, 0), record(8, [9], 1, LATER_MS)])
    with serving("busy.jsonl", *SIZES, "--name", "gpu-node-1", cwd=folder) as first:
        address = re.search(r"listens at (\S+);", first.stdout.readline())[1]
        options = ("--name", "gpu-node-2", "--registry", address)
        with serving("t.jsonl", *SIZES, *options, cwd=folder) as second:
            second.stdout.readline()
            listed = []
            while not listed:
                told = ask(folder, "sequences", "--node", "gpu-node-1", "--json")
                listed = json.loads(told.stdout)["sequences"]
            name = str(listed[0]["sequence_id"])
            arguments = ("--sequence-id", name, "--target-node", "gpu-node-2", "--node", "gpu-node-1")
            done = ask(folder, "migrate", *arguments)
            assert done.returncode == 0, done.stderr
            shown = ask(folder, "migration-status", "--node", "gpu-node-1", COLUMNS="80").stdout
            [line] = [line for line in shown.splitlines() if f"sequence {name} " in line]
            assert re.search(r" done +move to gpu-node-2 ", line)
            assert max(map(len, shown.splitlines())) <= 80, shown


def test_help_fits_the_designs_options_in_80_columns(folder):
    shown = ask(folder, "serve", "--help", COLUMNS="80").stdout
    for option in ("--kv-pool-size", "--kv-block-size", "--enable-defragmentation", "--defrag-threshold"):
        assert f"{option} " in shown
    both = ask(folder, "serve", "--blocks", "5", "--kv-pool-size", "6")
    assert both.returncode == 2
    assert "kv_pool_size is another name of blocks; give one of them" in both.stderr
