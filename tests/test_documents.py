"""Documented code runs and prints the documented output: doctests, examples, README commands."""

import ast
import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kv_pool import AllBlocksCleared, BlockRemoved, BlockStored
from kv_pool.events import KVEventBatch, PublisherConfig, decode_batch, encode_batch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EVENTS_README = (ROOT / "kv_pool" / "events" / "README.md").read_text()
REPLAY_README = (ROOT / "kv_pool" / "lab" / "README.md").read_text()
GUIDES = {
    "README": README,
    "readers of the event stream": EVENTS_README.partition("\n## Reading the stream\n")[2],
    "schedulers": "kv_pool/manager/README.md",
    "pools by id": "kv_pool/adapter/README.md",
    "tiers": "kv_pool/tiers/README.md",
    "replays": REPLAY_README,
    "migration": "kv_pool/migration/README.md",
    "salts": "kv_pool/manager/requests/salts.md",
}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDED = {
    "batching_a_model.py": [pytest.mark.transformers],
    "paged_generation.py": [pytest.mark.transformers],
    "paged_transformer.py": [pytest.mark.torch],
    "prefill_and_decode.py": [pytest.mark.transformers],
}
SHOWN = [
    "kv_pool.adapter.device_pools",
    "kv_pool.adapter.gpu_kv_pool",
    "kv_pool.adapter.migration_manager",
    "kv_pool.loggers",
    "kv_pool.metrics.span_attributes",
    "kv_pool.reports.allocation_monitor",
    "kv_pool.reports.layout",
    "kv_pool.contiguous.run_pool",
    "kv_pool.core.block_hash",
    "kv_pool.core.block_pool",
    "kv_pool.events.event_publisher",
    "kv_pool.events.mirror",
    "kv_pool.integrations.nano_vllm",
    "kv_pool.integrations.sequence_allocator",
    "kv_pool.manager.kv_cache_manager",
    "kv_pool.manager.preemption",
    "kv_pool.manager.requests.request",
    "kv_pool.storage.kv_storage",
    "kv_pool.tiers.formats.__init__",
    "kv_pool.tiers.tier",
    "kv_pool.tiers.tiered_cache",
]


@pytest.mark.parametrize("name", SHOWN)
def test_docstring_examples_run(name):
    # From the source, since compiled classes do not carry their docstrings.
    source = (ROOT / (name.replace(".", "/") + ".py")).read_text()
    parser = doctest.DocTestParser()
    runner = doctest.DocTestRunner()
    tried = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            shown = ast.get_docstring(node) or ""
            tried += runner.run(parser.get_doctest(shown, {}, node.name, name, 0)).attempted
    assert tried > 0
    assert runner.summarize(verbose=False).failed == 0


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.name, marks=NEEDED.get(path.name, [])) for path in EXAMPLES],
)
def test_examples_print_their_documented_output(path):
    """An example ends with its output as a comment, after `# prints:`."""
    report = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    _, _, expected = path.read_text().partition("\n# prints:\n")
    assert expected
    lines = [line.removeprefix("#").removeprefix(" ") for line in expected.strip().splitlines()]
    assert report.stdout.strip().splitlines() == lines


@pytest.mark.parametrize(
    "name", ["batching_a_model", "paged_generation", "paged_transformer", "prefill_and_decode"]
)
def test_example_without_torch_says_what_to_install(name):
    path = str(ROOT / "examples" / f"{name}.py")
    code = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({path!r})"
    report = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert report.returncode == 1
    needed = r"this example needs (torch|torch and transformers) \(.*\): pip install '.\[(\w+)\]'\n"
    packages, extra = re.fullmatch(needed, report.stderr).groups()
    assert packages.endswith(extra)


def test_readme_has_at_most_220_lines():
    assert len(README.splitlines()) <= 220


@pytest.fixture
def chat(tmp_path):
    """Return a folder with the trace that the replay guide shows."""
    (tmp_path / "chat.jsonl").write_text(re.search(r"```json\n(.*?)```", REPLAY_README, re.DOTALL)[1])
    return tmp_path


@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_prints_the_output_that_it_shows(name, chat):
    """The Python code is one program; its output is the text behind its parts."""
    page = GUIDES[name]
    if page.endswith(".md"):
        page = (ROOT / page).read_text()
    code = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    shown = re.findall(r"```python\n(?:(?!```)[^\n]*\n)*```\n\n```text\n(.*?)```", page, re.DOTALL)
    command = [sys.executable, "-c", code]
    report = subprocess.run(command, capture_output=True, text=True, check=True, cwd=chat)
    assert report.stdout == "".join(shown) != ""


def test_event_guide_shows_the_bytes_that_are_sent():
    shown = []
    for block in re.findall(r"```hex\n(.*?)```", EVENTS_README, re.DOTALL):
        payload = bytes.fromhex("".join(re.findall(r"^(?:[0-9a-f]{2}(?: |$))+", block, re.MULTILINE)))
        batch = decode_batch(payload)
        assert (batch.num_dropped, batch.ts, batch.data_parallel_rank) == (0, 1700000000.5, 0)
        assert encode_batch(KVEventBatch(batch.ts, batch.events, 0)) == payload
        shown.append([type(event) for event in batch.events])
    assert shown == [[BlockStored], [BlockRemoved] * 3, [AllBlocksCleared]]


def read_labels(table):
    """Return the rows of a printed table without their numbers and spaces."""
    rows = [line for line in table.splitlines() if line.startswith("│")]
    return [re.sub(r"[\d.,%\s]", "", row.replace("µs", "")) for row in rows]


@pytest.mark.parametrize(
    ("page", "command"),
    [(README, "kv-pool replay mooncake"), (REPLAY_README, "$ kv-pool replay mooncake")],
    ids=["README", "replay guide"],
)
def test_printed_replay_tables_have_the_rows_of_the_command(page, command):
    """The numbers are of the whole trace; here its start is enough for all rows."""
    shown = page[page.index(command) :]
    arguments = re.match(r"(?:.*\\\n)*.*", shown)[0].replace("\\\n", "").removeprefix("$ ").split()[1:]
    command_line = [sys.executable, "-P", "-m", "kv_pool", *arguments, "--limit", "1500"]
    report = subprocess.run(command_line, capture_output=True, text=True, check=True)
    shown_labels = read_labels(shown[: shown.index("```", shown.index("│"))])
    printed_labels = read_labels(report.stdout)
    assert len(shown_labels) > 5
    assert [label for label in shown_labels if label not in printed_labels] == []


def test_replay_guide_shows_the_table_of_its_trace(chat):
    shown = re.search(r"\$ kv-pool (replay chat.jsonl .*)\n((?:.*\n)*?)\.\.\.", REPLAY_README)
    command = [sys.executable, "-P", "-m", "kv_pool", *shown[1].split()]
    report = subprocess.run(command, capture_output=True, text=True, check=True, cwd=chat)
    # The widths depend on the times in later rows.
    printed, expected = (re.findall(r"[^\s│┌┐├┤┬─┴┼]+", text) for text in (report.stdout, shown[2]))
    assert len(expected) > 10
    assert printed[: len(expected)] == expected


def test_event_guide_publisher_configuration_is_valid(tmp_path):
    (tmp_path / "publisher.toml").write_text(re.search(r"```toml\n(.*?)```", EVENTS_README, re.DOTALL)[1])
    assert PublisherConfig.from_toml(tmp_path / "publisher.toml").topic == "kv@pod-1@a-model"


def test_links_in_the_documents_resolve():
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "kv_pool").rglob("*.md")]
    for document in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"
