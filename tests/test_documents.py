"""What the documents show is what happens: doctests, examples, README commands."""

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
TIERS_README = (ROOT / "kv_pool" / "tiers" / "README.md").read_text()
REPLAY_README = (ROOT / "kv_pool" / "replay" / "README.md").read_text()
MANAGER_README = (ROOT / "kv_pool" / "manager" / "README.md").read_text()
ADAPTER_README = (ROOT / "kv_pool" / "adapter" / "README.md").read_text()
MIGRATION_README = (ROOT / "kv_pool" / "migration" / "README.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS_TRANSFORMERS = {"batching_a_model.py", "paged_generation.py", "prefill_and_decode.py"}
SHOWN = [
    "kv_pool.adapter.device_pools",
    "kv_pool.adapter.gpu_kv_pool",
    "kv_pool.adapter.migration_manager",
    "kv_pool.reports.allocation_monitor",
    "kv_pool.reports.layout",
    "kv_pool.contiguous.run_pool",
    "kv_pool.core.block_hash",
    "kv_pool.core.block_pool",
    "kv_pool.events.config",
    "kv_pool.events.mirror",
    "kv_pool.integrations.block_space_manager",
    "kv_pool.integrations.nano_vllm",
    "kv_pool.integrations.nano_vllm_views",
    "kv_pool.integrations.sequence_allocator",
    "kv_pool.manager.kv_cache_manager",
    "kv_pool.manager.preemption",
    "kv_pool.manager.requests.request",
    "kv_pool.storage.kv_storage",
    "kv_pool.tiers.formats.make_format",
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
    [
        pytest.param(
            path,
            id=path.name,
            marks=[pytest.mark.transformers] if path.name in NEEDS_TRANSFORMERS else [],
        )
        for path in EXAMPLES
    ],
)
def test_examples_print_what_they_say(path):
    """An example ends with its own output as a comment, after `# prints:`."""
    told = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    _, _, expected = path.read_text().partition("\n# prints:\n")
    assert expected
    lines = [line.removeprefix("#").removeprefix(" ") for line in expected.strip().splitlines()]
    assert told.stdout.strip().splitlines() == lines


def test_the_readme_shows_the_output_of_its_first_example():
    code, output = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL).groups()
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == output


def test_the_bytes_on_the_page_about_events_are_those_that_are_sent():
    shown = []
    for block in re.findall(r"```hex\n(.*?)```", EVENTS_README, re.DOTALL):
        payload = bytes.fromhex("".join(re.findall(r"^(?:[0-9a-f]{2}(?: |$))+", block, re.MULTILINE)))
        batch = decode_batch(payload)
        assert (batch.num_dropped, batch.ts, batch.data_parallel_rank) == (0, 1700000000.5, 0)
        assert encode_batch(KVEventBatch(batch.ts, batch.events, 0)) == payload
        shown.append([type(event) for event in batch.events])
    assert shown == [[BlockStored], [BlockRemoved] * 3, [AllBlocksCleared]]


def test_the_readers_on_the_page_about_events_print_what_it_says():
    guide = EVENTS_README.partition("\n## Reading it\n")[2]
    code = "".join(re.findall(r"```python\n(.*?)```", guide, re.DOTALL))
    output = "".join(re.findall(r"```text\n(.*?)```", guide, re.DOTALL))
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == output


def test_the_guide_for_schedulers_prints_what_it_says():
    """One program from the first line to the last."""
    code = "".join(re.findall(r"```python\n(.*?)```", MANAGER_README, re.DOTALL))
    guide = MANAGER_README.partition("\n## One request\n")[2]
    output = "".join(re.findall(r"```text\n(.*?)```", guide, re.DOTALL))
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == output


def test_the_guide_to_pools_by_id_prints_what_it_says():
    """One program from the first line to the last."""
    code = "".join(re.findall(r"```python\n(.*?)```", ADAPTER_README, re.DOTALL))
    output = "".join(re.findall(r"```text\n(.*?)```", ADAPTER_README, re.DOTALL))
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == output


def test_the_guide_to_tiers_prints_what_it_says():
    """One program from the first line to the last."""
    code = "".join(re.findall(r"```python\n(.*?)```", TIERS_README, re.DOTALL))
    output = "".join(re.findall(r"```\n\n```text\n(.*?)```", TIERS_README, re.DOTALL))
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == output


def test_the_page_about_replays_prints_what_it_says():
    code, output = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", REPLAY_README, re.DOTALL).groups()
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == output


def test_the_guide_to_migration_prints_what_it_says():
    """One program, with a backend of its own in it."""
    code = "".join(re.findall(r"```python\n(.*?)```", MIGRATION_README, re.DOTALL))
    shown = re.findall(r"```text\n(.*?)```", MIGRATION_README, re.DOTALL)
    output = "".join(text for text in shown if "the source" not in text)
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == output


def test_the_publisher_on_the_page_about_events_can_be_configured_so(tmp_path):
    (tmp_path / "publisher.toml").write_text(re.search(r"```toml\n(.*?)```", EVENTS_README, re.DOTALL)[1])
    assert PublisherConfig.from_toml(tmp_path / "publisher.toml").topic == "kv@pod-1@a-model"


def test_links_in_the_documents_lead_somewhere():
    for document in (
        ROOT / "README.md",
        ROOT / "kv_pool" / "README.md",
        ROOT / "kv_pool" / "adapter" / "README.md",
        ROOT / "kv_pool" / "events" / "README.md",
        ROOT / "kv_pool" / "integrations" / "README.md",
        ROOT / "kv_pool" / "manager" / "README.md",
        ROOT / "kv_pool" / "replay" / "README.md",
        ROOT / "kv_pool" / "tiers" / "README.md",
        ROOT / "kv_pool" / "migration" / "README.md",
        ROOT / "benchmarks" / "README.md",
    ):
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"
