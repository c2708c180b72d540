"""The pages of the documentation site, in the order of its navigation, each with one line about it.

Guides are Markdown files of the repository and keep their paths, so that links between them work in both
places. The other pages are generated: see `site_commands`, `site_api` and `site_sources`.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from site_api import list_api_pages
from site_commands import list_command_pages
from site_sources import list_example_pages

ROOT = Path(__file__).parent.parent


class Page(NamedTuple):
    """A page of the site.

    Attributes:
        path: of its Markdown on the site; the same as in the repository, if the page is a file there.
        about: one line for `llms.txt`.
    """

    path: str
    title: str
    about: str


GUIDES: Mapping[str, tuple[Page, ...]] = {
    "Engine developers": (
        Page(
            "kv_pool/manager/README.md",
            "Under your own scheduler",
            "KVCacheManager: the calls of a scheduler step in order, forks, preemption, groups, compaction",
        ),
        Page(
            "kv_pool/manager/requests/salts.md",
            "Salts and timing",
            "which requests may share blocks, salts by region of a prompt, the timing channel, test vectors",
        ),
        Page(
            "kv_pool/manager/interrupted_calls.md",
            "When a call is interrupted",
            "exceptions of signal handlers in the middle of a call, PoolInterruptedError, repair()",
        ),
        Page(
            "kv_pool/adapter/README.md",
            "Blocks by id",
            "GPUKVPool: thread-safe allocation by sequence id, runs, eviction under pressure, remapping",
        ),
        Page(
            "kv_pool/contiguous/README.md",
            "Runs and compaction",
            "runs of consecutive ids, compaction in a full cache, what an engine does when ids change",
        ),
        Page(
            "kv_pool/integrations/attention/README.md",
            "Attention over blocks",
            "paged_attention and ShardedStorage: attention over the pool's blocks, tensor parallelism",
        ),
    ),
    "vLLM and other engines": (
        Page(
            "kv_pool/integrations/README.md",
            "Under an existing engine",
            "the pool under vLLM, nano-vllm, transformers or a fork of vLLM, and what to test",
        ),
        Page(
            "kv_pool/integrations/vllm/request_options/README.md",
            "Retention by request",
            "the JSON that a client of vLLM sends to keep, pin, demote or release tokens, and the answers",
        ),
        Page(
            "kv_pool/integrations/vllm/connector/README.md",
            "Host and disk tiers for vLLM",
            "KVPoolConnector: what vLLM's pool evicts stays in host memory and on disk",
        ),
    ),
    "Operators": (
        Page(
            "kv_pool/control/README.md",
            "A running pool",
            "watch, compact and migrate the pool of an engine with kv-pool stats, layout, defrag, migrate",
        ),
        Page(
            "kv_pool/metrics/README.md",
            "Metrics",
            "each metric and what to do when it looks bad; Prometheus, OpenTelemetry, the span of a request",
        ),
        Page(
            "examples/monitoring/README.md",
            "Prometheus and Grafana",
            "a board, alerts, and how to try them on one machine without containers",
        ),
        Page(
            "kv_pool/tiers/README.md",
            "Lower tiers",
            "host memory and disk below the device's pool, restarts, formats of cold blocks",
        ),
        Page(
            "kv_pool/migration/README.md",
            "Migration between nodes",
            "nodes, backends, the phases of a migration, what is promised, what a failure looks like",
        ),
    ),
    "Router developers": (
        Page(
            "kv_pool/events/README.md",
            "The event stream",
            "wire format, hashes, subscriber, snapshots, guarantees, readers that were tested",
        ),
    ),
    "Researchers": (
        Page(
            "kv_pool/lab/research.md",
            "From a question to a figure",
            "ten minutes to a figure, how hits are counted, what is modelled, published claims reproduced",
        ),
        Page(
            "kv_pool/lab/README.md",
            "Replaying traces",
            "trace and report formats, clocks, sweeps, curves",
        ),
        Page(
            "kv_pool/policies/README.md",
            "Cache policies",
            "write a policy in ten minutes; the included ones, their papers and hints",
        ),
        Page(
            "benchmarks/README.md",
            "Benchmarks",
            "one script per question: command, results, what is not shown",
        ),
    ),
}
"""By reader, in the order in which that reader needs them."""


def read_summary() -> str:
    """Return the project's description, in one sentence."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return f"{project['description']}."


def list_sections() -> dict[str, dict[str, list[Page]]]:
    """Return all pages of the navigation, by tab and by group within the tab; "" is the tab's own group."""
    make = Page._make
    return {
        "Overview": {
            "": [Page("README.md", "kv_pool", "what it is, two commands, twenty lines, how fast it is")]
        },
        "Guides": {reader: list(pages) for reader, pages in GUIDES.items()},
        "Examples": {"": [make(page) for page in list_example_pages()]},
        "Commands": {"": [make(page) for page in list_command_pages()]},
        "API": {"": [make(page) for page in list_api_pages()]},
        "Project": {
            "": [
                Page("kv_pool/README.md", "Map of the code", "every file, and where to go to change what"),
                Page("kv_pool/CHANGELOG.md", "Changelog", "what users notice in each version"),
            ]
        },
    }


def list_pages() -> list[Page]:
    """Return all pages of the navigation, in its order."""
    return [page for groups in list_sections().values() for pages in groups.values() for page in pages]


def make_navigation() -> list[dict[str, object]]:
    """Return the navigation as MkDocs takes it."""
    tabs: list[dict[str, object]] = []
    for tab, groups in list_sections().items():
        items: list[dict[str, object]] = []
        for group, pages in groups.items():
            links: list[dict[str, object]] = [{page.title: page.path} for page in pages]
            items += [{group: links}] if group else links
        tabs.append({tab: items})
    return tabs


def make_llms_text(address_of: Mapping[str, str]) -> str:
    """Return `llms.txt`, in the form of https://llmstxt.org: title, summary, then all pages by section.

    Args:
        address_of: by the path of a page where it is read; pages that are not in it are left out.
    """
    lines = ["# kv_pool", "", f"> {read_summary()}"]
    for tab, groups in list_sections().items():
        for group, pages in groups.items():
            listed = [page for page in pages if page.path in address_of]
            if listed:
                lines += ["", f"## {f'{tab}: {group}' if group else tab}", ""]
                lines += [f"- [{page.title}]({address_of[page.path]}): {page.about}" for page in listed]
    return "\n".join(lines) + "\n"
