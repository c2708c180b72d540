"""Output in any encoding, to closed pipes, narrow terminals and files."""

import io
import json
import os
import subprocess
import sys
from functools import partial

import pytest
from cli.kv_pool_command import kv_pool_command
from cli.running_commands import serving
from lab.made_trace import record, write_trace
from rich import box
from rich.console import Console

from kv_pool.cli.console import lay_out, print_parts, print_report, refresh_forever, show_progress
from kv_pool.cli.migrate import tabulate
from kv_pool.control.messages import MigrationList
from kv_pool.lab.tables import Fact, Report, ReportTable, make_facts
from kv_pool.migration.messages import MigrationPhase, MigrationStatus

SIZES = ("--trace-block-size", "8", "--blocks", "50")
REPLAY = f"replay trace.jsonl {' '.join(SIZES)}"
SWEEP = f"sweep trace.jsonl {' '.join(SIZES)}"
ROW = ("a-name-of-some-length", "1,234,567,890", "several words of explanation that may be folded")


@pytest.fixture
def folder(tmp_path):
    write_trace(tmp_path / "trace.jsonl", [record(24, [1, 2, 3]), record(32, [1, 2, 4, 5])])
    return tmp_path


def print_to(width, is_terminal, table=None):
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)
    print_parts(lay_out(table or make_facts("", [Fact(*ROW)]), console), console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [20, 60, 80])
def test_narrow_terminal_keeps_names_and_numbers_whole(width):
    printed = print_to(width, is_terminal=True)
    assert ROW[0] in printed
    assert ROW[1] in printed
    assert all(word in printed for word in ROW[2].split())
    assert ROW[2] not in printed


def test_nothing_is_folded_in_a_pipe():
    assert all(cell in print_to(80, is_terminal=False) for cell in ROW)


@pytest.mark.parametrize("width", [44, 60, 80, 200])
def test_a_table_too_wide_loses_nothing(width):
    """Columns that did not fit used to be dropped, or to run over the edge of the terminal."""
    titles = ("blocks", "policy", "gap that is closed", "points over LRU", "hits of blocks", "")
    rows = [
        (f"{10_000 + number:,}", f"policy{number}", None, "+0.18 [+0.00, +0.51]", f"{number:,}", "two words")
        for number in range(3)
    ]
    printed = print_to(width, True, ReportTable(titles, rows, ("policy", ""), "A title", "a caption", 2))
    lines = printed.splitlines()
    assert max(map(len, lines)) <= width
    assert (lines[0].strip(), lines[-1].strip()) == ("A title", "a caption")
    for row in rows:
        for cell in filter(None, row):
            assert all(word in printed for word in cell.split())
    assert all(word in printed for title in titles for word in title.split())
    parts = printed.count("┏")
    assert printed.count("policy2") == parts == (1 if width > 70 else parts)


@pytest.fixture
def terminal(monkeypatch):
    """What commands print to a terminal of 80 columns."""
    file = io.StringIO()
    make_console = partial(Console, file=file, width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr("kv_pool.cli.console.Console", make_console)
    return file


def test_progress_shows_its_clock_at_80_columns(terminal, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with show_progress("replaying") as notify:
        notify("12,345 requests, token hit rate 34.5%, pool 97% in use", 0.5)
    assert " 50% 0:00:00 12,345 requests, token hit" in terminal.getvalue()


def test_a_wide_table_makes_the_next_one_no_wider(terminal):
    wide = make_facts("", [Fact("installed in", "/" * 100)])
    print_report(Report(None, [wide, ReportTable(("blocks", *"abcd"), [["1" * 14] * 5])]))
    assert max(len(line) for line in terminal.getvalue().splitlines()[-5:]) <= 80


def test_long_keys_are_not_repeated_for_each_column():
    key = "s" * 60
    assert print_to(80, True, ReportTable(("session", *"abc"), [[key, *["1" * 14] * 3]])).count(key) == 1


@pytest.mark.slow
def test_sweep_bars_and_info_paths_stay_whole_at_80_columns(folder):
    write_trace(folder / "trace.jsonl", [record(32, [1, 2, 3, 4])] * 50)
    done = kv_pool_command("sweep", "trace.jsonl", *SIZES, cwd=folder, COLUMNS="80")
    [row] = [line for line in done.stdout.splitlines() if line.startswith("│")]
    share = float(row.split("│")[2].strip().removesuffix("%")) / 100
    assert row.count("█") == round(16 * share) > 8
    done = kv_pool_command("info", cwd=folder, COLUMNS="40")
    assert "…" not in done.stdout
    assert json.loads(kv_pool_command("info", "--json", cwd=folder).stdout)["installed in"] in done.stdout


def make_status(name):
    return MigrationStatus(
        migration_id="1" * 32,
        subject="sequence 1234567890123",
        peer=name,
        direction="out",
        is_move=True,
        phase=MigrationPhase.DONE,
        started=0.0,
    )


def test_watched_migration_is_shown_whole_in_a_pipe():
    """The id used to be cut off, and the phase to be missing."""
    console = Console(file=io.StringIO(), width=60, force_terminal=False)
    statuses = iter([make_status("a-node-with-a-long-name")])

    def look():
        return lay_out(tabulate(MigrationList("a", [next(statuses)]), 20), console, box=box.SIMPLE)

    with pytest.raises(StopIteration):
        refresh_forever(look, console)
    [row] = [line for line in console.file.getvalue().splitlines() if "sequence" in line]
    assert " ".join(row.split()).startswith("sequence 1234567890123 done move to a-node-with-a-long-name 0/0")


def test_markup_and_escapes_in_node_names_are_shown():
    console = Console(file=io.StringIO(), width=120)
    table = tabulate(MigrationList("[/x]\x1b[2J", [make_status("[bold]b\x1b[31m")]), 20)
    print_parts(lay_out(table, console), console)
    printed = console.file.getvalue()
    assert "\x1b" not in printed
    assert r"node [/x]\x1b[2J" in printed
    assert r"move to [bold]b\x1b[31m" in printed


HOSTILE = "漢[red]\x1b]0;title\x07\x9b2J\u202e.jsonl"


@pytest.mark.parametrize("command", ["replay", "sweep"])
def test_markup_and_escapes_in_a_trace_name_are_shown(folder, command):
    (folder / "trace.jsonl").rename(folder / HOSTILE)
    done = kv_pool_command(command, HOSTILE, *SIZES, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(line.isprintable() for line in done.stdout.splitlines())
    if command == "replay":
        assert r"漢[red]\x1b]0;title\x07\x9b2J\u202e.jsonl" in done.stdout
    missing = kv_pool_command(command, f"[/x]{HOSTILE}", *SIZES, cwd=folder)
    assert missing.returncode == 2
    assert all(line.isprintable() for line in missing.stderr.splitlines())
    assert r"[/x]漢[red]\x1b]0;title" in missing.stderr


@pytest.mark.parametrize(
    "arguments",
    ["--help", "serve --help", "info", REPLAY, SWEEP],
)
def test_ascii_terminal_causes_no_traceback(folder, arguments):
    done = kv_pool_command(*arguments.split(), cwd=folder, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["stats", "defrag", "layout", "sequences"])
def test_ascii_terminal_causes_no_traceback_in_pool_commands(folder, command):
    with serving("trace.jsonl", *SIZES, "--block-size", "8", "--socket", "here.sock", cwd=folder):
        done = kv_pool_command(command, "--socket", "here.sock", cwd=folder, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


@pytest.mark.parametrize("arguments", ["info", "--help", REPLAY, f"{SWEEP} --jobs 1 --png here.png"])
def test_closed_output_causes_no_traceback_and_loses_no_picture(folder, arguments):
    readable, writable = os.pipe()
    os.close(readable)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kv_pool", *arguments.split()],
        cwd=folder,
        stdout=writable,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writable)
    assert done.stderr == b""
    assert done.returncode in (1, 141)
    assert (folder / "here.png").exists() == ("here.png" in arguments)
