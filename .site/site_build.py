"""Build the documentation site: gather its pages in `build/site-source`, run MkDocs, write `build/site`.

Run it as `.ci/docs` does. MkDocs checks links between pages, to files of the repository and to headings; a
broken link ends the build with status 1.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from site_api import FOLDER as API_FOLDER
from site_api import make_api_pages
from site_commands import make_command_pages
from site_pages import ROOT, list_pages, make_llms_text, make_navigation, read_summary
from site_sources import (
    find_place,
    inline_pictures,
    is_shown,
    list_linked_files,
    make_source_page,
    rewrite_links,
)

SITE = ROOT / "build" / "site"
GATHERED = ROOT / "build" / "site-source"


class Contents(NamedTuple):
    """The sources of the site, by path on the site.

    Attributes:
        pages: Markdown, whose links lead to pages and files of the site.
        with_pictures: the pages that link to pictures, with the pictures in place of the links.
        files: paths in the repository of what is served as it is.
    """

    pages: dict[str, str]
    with_pictures: dict[str, str]
    files: dict[str, Path]


def main() -> int:
    """Gather, build, add `llms.txt`. Returns MkDocs' exit status."""
    contents = read_contents()
    gather(contents)
    # Not --quiet: MkDocs does not count the warnings that it does not print, and --strict would find none.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / ".site")}
    status = subprocess.run([*command, "-f", str(GATHERED / "mkdocs.yml")], env=environment).returncode
    if status == 0:
        add_llms_text(contents.pages)
    return status


def read_contents() -> Contents:
    """Read the guides and what they link to, and make the other pages."""
    pages = make_command_pages() | make_api_pages()
    with_pictures = {}
    sources = set()
    for page in list_pages():
        if (ROOT / page.path).is_file():
            text = (ROOT / page.path).read_text()
            sources |= list_linked_files(page.path, text)
            pages[page.path] = rewrite_links(page.path, text)
            with_pictures[page.path] = rewrite_links(page.path, inline_pictures(page.path, text))
        elif page.path.startswith("examples/"):
            sources.add(page.path.removesuffix(".md"))
    pages |= {find_place(source): make_source_page(source) for source in sources if is_shown(source)}
    files = {find_place(source): ROOT / source for source in sources if not is_shown(source)}
    return Contents(pages, with_pictures, files)


def gather(contents: Contents) -> None:
    """Write pages, files and MkDocs' configuration, in place of what was there."""
    shutil.rmtree(GATHERED, ignore_errors=True)
    folder = GATHERED / "pages"
    shutil.copytree(ROOT / ".site" / "static", folder)
    for path, text in (contents.pages | contents.with_pictures).items():
        is_alone = path == "README.md"  # in its tab, so that there is nothing to list beside it
        write(folder / path, f"---\nhide: [navigation]\n---\n\n{text}" if is_alone else text)
    for path, source in contents.files.items():
        write(folder / path, source.read_text())
    added = {
        "site_description": read_summary(),
        "docs_dir": str(folder),
        "site_dir": str(SITE),
        "nav": make_navigation(),
    }
    settings = (ROOT / ".site" / "mkdocs.yml").read_text()
    lines = [f"{name}: {json.dumps(value)}" for name, value in added.items()]  # JSON is YAML
    write(GATHERED / "mkdocs.yml", "\n".join([settings, *lines, ""]))


def add_llms_text(pages: dict[str, str]) -> None:
    """Write `llms.txt` to the site, and the Markdown of pages, to which it links."""
    base = os.environ.get("SITE_URL", "").rstrip("/")
    base = f"{base}/" if base else ""
    addresses = {}
    for path, text in pages.items():
        if path.startswith(API_FOLDER):
            addresses[path] = (
                f"{base}{path.removesuffix('.md')}/"  # its Markdown only names what is documented
            )
        else:
            addresses[path] = f"{base}{path}"
            write(SITE / path, text)
    write(SITE / "llms.txt", make_llms_text(addresses))


def write(path: Path, text: str) -> None:
    """Write a file, and make its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
