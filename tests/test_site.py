"""The documentation site has every guide, command and public name. `.ci/docs` builds it and checks links."""

import re
from pathlib import Path

import pytest
from site_api import list_public_names, make_api_pages, name_exceptions, split_names
from site_commands import find_path, list_commands, make_command_pages
from site_pages import list_pages
from site_sources import list_linked_files, rewrite_links

from kv_pool.cli.sub_commands import make_command

ROOT = Path(__file__).parent.parent
PATHS = [page.path for page in list_pages()]
COMMANDS = list_commands(make_command("1.0"))


def list_documents():
    """Return the Markdown files of the repository that are documentation."""
    folders = (ROOT / "kv_pool", ROOT / "benchmarks", ROOT / "examples")
    return [ROOT / "README.md", *(path for folder in folders for path in sorted(folder.rglob("*.md")))]


def test_every_document_is_a_page():
    documents = {path.relative_to(ROOT).as_posix() for path in list_documents()}
    assert {"kv_pool/manager/README.md", "benchmarks/README.md"} <= documents
    assert documents - set(PATHS) == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_command_page_has_the_options_of_its_help(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    COMMANDS[name].main(["--help"], prog_name=f"kv-pool {name}", standalone_mode=False)
    printed = set(re.findall(r"(?<=[ │])--[a-z][a-z-]*(?= )", capsys.readouterr().out)) - {"--help"}
    page = make_command_pages()[find_path(name)]
    assert printed
    assert printed <= set(re.findall(r"`(--[a-z-]+)`", page))


def test_every_public_name_is_documented_once():
    documented = []
    for page in make_api_pages().values():
        documented += re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    names = [name.rpartition(".")[2] for name in documented]
    public = {name for exported in list_public_names().values() for name in exported}
    assert {"KVCacheManager", "GPUKVPool", "PrefixMirror", "OutOfBlocksError"} <= public
    assert len(names) == len(set(names))
    assert set(names) == public


def test_links_are_rewritten_to_pages_of_the_site():
    text = (
        "[guide](../events/README.md#frames) [code](../core/block.py) "
        "[figures](../../benchmarks/results/tiers.json) [script](../../.ci/peers) [folder](../contiguous) [site](https://host/a.py)"
    )
    assert rewrite_links("kv_pool/manager/README.md", text) == (
        "[guide](../events/README.md#frames) [code](../core/block.py.md) "
        "[figures](../../benchmarks/results/tiers.json) [script](../../ci/peers.md) folder [site](https://host/a.py)"
    )
    assert list_linked_files("kv_pool/manager/README.md", text) == {
        "kv_pool/core/block.py",
        "benchmarks/results/tiers.json",
        ".ci/peers",
    }


def test_names_with_a_shared_description_each_get_it():
    text = "Do it.\n\nArgs:\n    first, last: the ends,\n        both included.\n    step: how far.\n"
    ends = "the ends,\n        both included.\n"
    assert split_names(text) == (f"Do it.\n\nArgs:\n    first: {ends}    last: {ends}    step: how far.\n")


def test_exceptions_without_a_class_are_shown_as_any():
    named = "    KVPoolError: no,\n        never.\nCost: O(1)."
    text = f"Do it.\n\nRaises:\n    As `other`: nothing\n    has changed.\n{named}"
    read = name_exceptions(text)
    assert read == f"Do it.\n\nRaises:\n    Exception: As `other`: nothing\n        has changed.\n{named}"
