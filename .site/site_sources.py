"""Pages that show source files: the examples, and the files that the guides link to."""

import ast
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(?P<label>\[[^\[\]]*\])\((?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")
_LANGUAGES = {".py": "python", ".toml": "toml", ".txt": "text"}


def list_example_pages() -> list[tuple[str, str, str]]:
    """Return (path, title, summary) of each example's page, in alphabetical order."""
    pages = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        documentation = ast.get_docstring(ast.parse(path.read_text())) or ""
        first_line = " ".join(documentation.partition("\n\n")[0].split())
        pages.append((find_place(f"examples/{path.name}"), path.name, first_line.removesuffix(".")))
    return pages


def make_source_page(source: str) -> str:
    """Return the Markdown that shows a file, given its path in the repository. The search leaves it out."""
    path = ROOT / source
    text = path.read_text()
    language = _LANGUAGES.get(path.suffix, "sh" if text.startswith("#!") else "text")
    front = "" if source.startswith("examples/") else "---\nsearch:\n  exclude: true\n---\n\n"
    return f"{front}# {path.name}\n\n`{source}`\n\n````{language}\n{text.rstrip()}\n````\n"


def find_place(source: str) -> str:
    """Return the path on the site of a file of the repository, or of the page that shows it.

    MkDocs leaves out what begins with a dot.
    """
    return f"{source.removeprefix('.')}{'.md' if is_shown(source) else ''}"


def is_shown(source: str) -> bool:
    """Return whether a page shows this file: not Markdown, a page itself, nor what is served as it is."""
    return Path(source).suffix not in (".md", ".json", ".svg")


def inline_pictures(page: str, markdown: str) -> str:
    """Return the Markdown of a page with the SVGs themselves in place of links to them.

    So a picture takes the colours of the site's light or dark scheme, whatever the system prefers.
    """

    def inline(match: re.Match[str]) -> str:
        svg = (ROOT / _resolve(page, match["target"])).read_text()
        return f'<div class="picture">\n{svg.strip()}\n</div>'

    return re.sub(r"^!\[[^\]]*\]\((?P<target>[^()\s]+\.svg)\)$", inline, markdown, flags=re.MULTILINE)


def list_linked_files(page: str, markdown: str) -> set[str]:
    """Return the paths of files of the repository that a page links to, Markdown and folders left out."""
    targets = {_resolve(page, match["target"]) for match in _LINK.finditer(markdown)}
    return {target for target in targets if (ROOT / target).is_file() and not target.endswith(".md")}


def rewrite_links(page: str, markdown: str) -> str:
    """Return the Markdown with links to files as they are on the site, and links to folders as plain text."""

    def rewrite(match: re.Match[str]) -> str:
        target = _resolve(page, match["target"])
        if (ROOT / target).is_dir():
            return match["label"][1:-1]
        if not (ROOT / target).is_file():
            return match[0]
        place = posixpath.relpath(find_place(target), posixpath.dirname(page) or ".")
        return f"{match['label']}({place}{match['anchor'] or ''})"

    return _LINK.sub(rewrite, markdown)


def _resolve(page: str, target: str) -> str:
    """Return the path in the repository that a link of a page leads to; it need not exist."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
