"""`kv-pool trace info`: tables, and JSON."""

import json

import pytest
from cli.kv_pool_command import kv_pool_command
from lab.made_trace import record, write_trace

TRACE = [
    record(24, [1, 2, 3], 5, 0, session_id="x", tenant="t"),
    record(32, [1, 2, 4, 5], 9, 10_000, session_id="x", tenant="t"),
    record(16, [6, 7], 2, 90_000, session_id="y", tenant="u"),
]


@pytest.fixture
def folder(tmp_path):
    write_trace(tmp_path / "trace.gz", TRACE)
    return tmp_path


def info(folder, *options):
    done = kv_pool_command("trace", "info", "trace.gz", "--trace-block-size", "8", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tables_show_the_figures(folder):
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in info(folder).splitlines()
        if line.startswith("│")
    ]
    rows = {line[0]: line[1:] for line in lines}
    assert rows["requests"][0] == "3"
    assert rows["sessions"] == ["2", "1.5 requests each"]
    assert rows["tenants"][0] == "2"
    assert rows["distinct blocks"][0] == "7"
    assert rows["used once"] == ["71.4%", "5 blocks; the others 2.0 times each"]
    assert rows["between turns, s"] == ["10", "10", "10", "10", "10", "10"]
    assert rows["blocks per request"] == ["3", "2", "3", "4", "4", "4"]
    assert rows["full_blocks_cap"] == ["22.22%", "22.22%", "16"]


def test_json_has_the_same_figures(folder):
    found = json.loads(info(folder, "--json"))
    assert (found["requests"], found["sessions"], found["tenants"]) == (3, 2, 2)
    assert found["ceilings"]["ids_as_blocks"]["tokens_hit"] == 16
