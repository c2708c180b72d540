"""`kv-pool tiers`: table and JSON of a served pool's tiers."""

import json

from cli.kv_pool_command import kv_pool_command
from cli.running_commands import serving
from lab.made_trace import record, write_trace

from kv_pool.control import ControlClient

SIZES = ("--blocks", "12", "--block-size", "8", "--trace-block-size", "8", "--speedup", "50")


def test_a_served_pool_shows_its_tiers(tmp_path):
    records = [record(64, [8 * at + block for block in range(8)], 1, 1000 * at) for at in range(12)]
    write_trace(tmp_path / "trace.jsonl", records)
    tiers = ("--host-tier", "20", "--disk-tier", "cold", "--disk-tier-blocks", "100", "--socket", "here.sock")
    with serving("trace.jsonl", *SIZES, *tiers, cwd=tmp_path):
        with ControlClient(tmp_path / "here.sock") as client:
            while not client.list_tiers().hit_blocks["STORAGE"]:
                pass
        shown = kv_pool_command("tiers", "--socket", "here.sock", cwd=tmp_path).stdout
        report = json.loads(kv_pool_command("tiers", "--socket", "here.sock", "--json", cwd=tmp_path).stdout)
    assert [tier["medium"] for tier in report["tiers"]] == ["CPU", "STORAGE"]
    assert [tier["capacity"] for tier in report["tiers"]] == [20, 100]
    assert "20 of 20" in shown
    assert "hit blocks by medium: GPU " in shown
    with serving("trace.jsonl", *SIZES, "--socket", "here.sock", cwd=tmp_path):
        done = kv_pool_command("tiers", "--socket", "here.sock", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: the pool at here.sock has no lower tiers" in done.stderr


def test_invalid_tier_folder_is_one_line_and_status_2(tmp_path):
    write_trace(tmp_path / "trace.jsonl", [record(8, [1], 1)])
    (tmp_path / "cold").write_text("a file")
    done = kv_pool_command("serve", "trace.jsonl", *SIZES, "--disk-tier", "cold", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
