"""The commands and figures of the page for researchers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kv_pool.lab import ReplaySettings, run_replay
from kv_pool.lab.replay_request import CONVENTIONS

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "kv_pool" / "lab" / "research.md").read_text()
DATA = ROOT / "tests" / "lab" / "data"
AGENTIC = "agentic_coding_a.jsonl.xz"
SHOWN = [block for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL) if block.startswith("$ ")]
CLAIMS = re.findall(r"^\|[^|]*\| `(kv-pool [^`]*)`[^|]*\|([^|]*)\|[^|]*\|$", PAGE, re.MULTILINE)


def run(command, folder):
    """Run a command of the page and return its output."""
    command_line = [sys.executable, "-P", "-m", "kv_pool", *command.split()[1:]]
    report = subprocess.run(command_line, capture_output=True, text=True, check=False, cwd=folder)
    assert report.returncode == 0, report.stderr
    return report.stdout


def is_slow(commands):
    return any(word in commands for word in (AGENTIC, "compare", "plan ", "--policy"))


def read_words(line):
    """Return the words of a line of a table, without its frame, whose width depends on other rows."""
    return re.findall(r"[^\s│┃█]+", line)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block.split("\n")[0], marks=[pytest.mark.slow] if is_slow(block) else [])
        for block in SHOWN
    ],
)
def test_the_worked_question_prints_what_is_shown(tmp_path, block):
    """Shown lines are printed in this order; `...` stands for other lines or, at the end of one, columns."""
    for command, shown in re.findall(r"^\$ (kv-pool .*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
        printed = iter(read_words(line) for line in run(command, tmp_path).splitlines())
        for line in shown.splitlines():
            if line != "...":
                words = read_words(line.removesuffix("..."))
                assert any(words == other[: len(words)] for other in printed), f"{command}: no {line}"
    assert len(SHOWN) == 4
    if "--png" in block:
        assert (tmp_path / "curve.png").stat().st_size > 0


def list_numbers(text):
    """Return the numbers in a text as commands print them, without units."""
    return re.findall(r"\d[\d,]*\.?\d*(?<!,)", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "here"),
    [
        pytest.param(command, here, id=command)
        for command, here in CLAIMS
        if not {"TRACE", "FILE", "BLOCKS"}.intersection(command.split())
    ],
)
def test_published_claims_have_our_figures(tmp_path, command, here):
    """The command prints every number of the column; those in brackets are of other commands."""
    printed = list_numbers(run(command.replace(AGENTIC, str(DATA / AGENTIC)), tmp_path))
    shown = list_numbers(re.sub(r"\(.*\)", "", here))
    assert shown
    assert [number for number in shown if number not in printed] == []


@pytest.mark.slow
def test_published_hit_rates_per_session(tmp_path):
    [(command, here)] = [claim for claim in CLAIMS if "--by session" in claim[0]]
    run(command.replace(AGENTIC, str(DATA / AGENTIC)).replace("FILE", "report.json"), tmp_path)
    rows = json.loads((tmp_path / "report.json").read_text())["breakdowns"]["session"]
    rates = sorted(100 * row["token_hit_rate"] for row in rows)
    assert len(rates) == 80
    quartiles = [rates[round(79 * share)] for share in (0.25, 0.5, 0.75)]
    shown = [float(number) for number in list_numbers(here)]
    assert shown == pytest.approx([sum(rates) / 80, *quartiles], abs=0.15)


def read_rows(heading):
    """Return the cells of the table whose first line starts with `heading`, without its two head lines."""
    lines = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def replay_twice(folder, convention, num_tokens):
    """Replay a prompt in blocks of 16 tokens that arrives twice."""
    line = {"input_length": num_tokens, "hash_ids": list(range(-(-num_tokens // 16)))}
    (folder / "twice.jsonl").write_text(2 * (json.dumps(line) + "\n"))
    settings = ReplaySettings(str(folder / "twice.jsonl"), 10, convention=convention, trace_block_size=16)
    return run_replay(settings)


@pytest.mark.parametrize("row", read_rows("| convention | blocks that"), ids=lambda row: row[0].split("`")[0])
def test_conventions_worked_by_hand(tmp_path, row):
    convention = row[0].split("`")[0]
    report = replay_twice(tmp_path, convention, 40)
    counts = [report.blocks_hit, report.blocks_looked_up, report.tokens_hit, report.tokens_in]
    rates = [f"{100 * rate:.2f} %" for rate in (report.block_hit_rate, report.token_hit_rate)]
    assert row[3:] == [*map(str, counts), *rates]


def test_a_prompt_of_whole_blocks_is_limited_by_the_cap(tmp_path):
    hits = {name: replay_twice(tmp_path, name, 32).tokens_hit for name in CONVENTIONS}
    assert hits == {name: 16 if name.endswith("_cap") else 32 for name in CONVENTIONS}
    assert "32 of 64 tokens are hits without\n`_cap`, and 16 with it" in PAGE


def test_conventions_on_the_bundled_trace():
    reference = json.loads((DATA / "reference_hit_rates.json").read_text())["traces"]
    conventions = reference["mooncake_conversation"]["conventions"]
    rates = ("block_hit_rate", "token_hit_rate", "mean_request_token_hit_rate")
    for names, *cells in read_rows("| convention | 10,000 blocks"):
        for convention in re.findall(r"\w+", names):
            counted = conventions[convention]
            found = [counted[capacity][rate] for capacity in ("10000", "unlimited") for rate in rates]
            assert [float(cell.strip(" %")) for cell in cells] == pytest.approx(
                [100 * rate for rate in found], abs=0.0051
            )


@pytest.mark.slow
def test_python_analyses_print_what_is_shown():
    guide = PAGE.partition("### Two analyses in Python")[2]
    code = "".join(re.findall(r"```python\n(.*?)```", guide, re.DOTALL))
    output = "".join(re.findall(r"```text\n(.*?)```", guide, re.DOTALL))
    report = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert report.stdout == output
