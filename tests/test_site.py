"""The documentation site has every guide, command and public name. `.ci/docs` builds it and checks links."""

import re
from pathlib import Path

import pytest
from site_api import list_public_names, make_api_pages, name_exceptions, split_names
from site_commands import find_path, list_commands, make_command_pages
from site_pages import GUIDES, list_pages, make_llms_text, make_navigation
from site_sources import inline_pictures, list_linked_files, rewrite_links

from kv_pool.cli.sub_commands import make_command

ROOT = Path(__file__).parent.parent
PATHS = [page.path for page in list_pages()]
COMMANDS = list_commands(make_command("1.0"))


def list_documents():
    """Return the Markdown files of the repository that are documentation."""
    folders = (ROOT / "kv_pool", ROOT / "benchmarks", ROOT / "examples")
    return [ROOT / "README.md", *(path for folder in folders for path in sorted(folder.rglob("*.md")))]


def list_leaves(navigation):
    for item in navigation:
        for target in item.values():
            yield from [target] if isinstance(target, str) else list_leaves(target)


def test_every_document_is_a_page():
    documents = {path.relative_to(ROOT).as_posix() for path in list_documents()}
    assert {"kv_pool/manager/README.md", "benchmarks/README.md"} <= documents
    assert documents - set(PATHS) == set()


def test_every_page_is_in_the_navigation_once():
    assert list(list_leaves(make_navigation())) == PATHS
    assert len(set(PATHS)) == len(PATHS)


def test_every_page_is_a_file_or_generated():
    generated = make_command_pages().keys() | make_api_pages().keys()
    files = {path for path in PATHS if (ROOT / path).is_file()}
    examples = {path for path in PATHS if (ROOT / path.removesuffix(".md")).is_file()} - files
    assert files | examples | generated == set(PATHS)


def test_every_reader_has_a_guide():
    assert list(GUIDES) == [
        "Engine developers",
        "vLLM and other engines",
        "Operators",
        "Router developers",
        "Researchers",
    ]
    assert all(GUIDES.values())


def test_llms_text_describes_every_page():
    text = make_llms_text({path: f"https://host/{path}" for path in PATHS})
    title, summary, *rest = text.split("\n\n")
    assert (title, summary[:2]) == ("# kv_pool", "> ")
    assert {line[:3] for line in "\n".join(rest).splitlines()} == {"## ", "- ["}
    assert re.findall(r"^- \[[^\]]+\]\(https://host/([^)]+)\): \S", text, re.MULTILINE) == PATHS


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


def test_picture_replaces_its_link():
    text = "before\n\n![The layers](../.site/pictures/layers.svg)\n\nafter\n"
    page = inline_pictures("kv_pool/README.md", text)
    assert page.startswith('before\n\n<div class="picture">\n<svg ')
    assert page.endswith("</svg>\n</div>\n\nafter\n")


def test_names_with_a_shared_description_each_get_it():
    text = "Do it.\n\nArgs:\n    first, last: the ends,\n        both included.\n    step: how far.\n"
    ends = "the ends,\n        both included.\n"
    assert split_names(text) == (f"Do it.\n\nArgs:\n    first: {ends}    last: {ends}    step: how far.\n")


def test_exceptions_without_a_class_are_shown_as_any():
    named = "    KVPoolError: no,\n        never.\nCost: O(1)."
    text = f"Do it.\n\nRaises:\n    As `other`: nothing\n    has changed.\n{named}"
    read = name_exceptions(text)
    assert read == f"Do it.\n\nRaises:\n    Exception: As `other`: nothing\n        has changed.\n{named}"
