"""The pages of the API reference, one for each package, made from its `__all__` without an import."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = "reference/api"
_SEVERAL = re.compile(
    r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +.*)*)", re.MULTILINE
)
_RAISES = re.compile(
    r"^(?P<indent> *)Raises:\n(?P<entries>(?P=indent)    .*(?:\n(?P=indent)    .*)*)", re.MULTILINE
)


def list_api_pages() -> list[tuple[str, str, str]]:
    """Return (path, title, summary) of each package with public names, in alphabetical order."""
    return [(_find_path(module), module, _read_summary(module)) for module in list_public_names()]


def make_api_pages() -> dict[str, str]:
    """Return the Markdown of each page by its path: instructions for mkdocstrings, one for each name.

    A name that several packages export is documented in the deepest of them; the others refer to it.
    """
    public = list_public_names()
    home_of: dict[str, str] = {}
    for module in sorted(public, key=lambda module: module.count(".")):
        home_of |= dict.fromkeys(public[module], module)
    pages = {}
    for module, names in public.items():
        lines = [f"# {module}", "", _read_summary(module), ""]
        homes = sorted({home_of[name] for name in names} - {module})
        if homes:
            lines += ["| documented in | can be imported from here, too |", "|---|---|"]
        for home in homes:
            links = (f"[`{name}`][{home}.{name}]" for name in names if home_of[name] == home)
            lines.append(f"| `{home}` | {', '.join(links)} |")
        lines.append("")
        for name in names:
            if home_of[name] == module:
                lines += [f"::: {module}.{name}", "    options:", "      heading_level: 2", ""]
        pages[_find_path(module)] = "\n".join(lines)
    return pages


def list_public_names() -> dict[str, list[str]]:
    """Return by package its public names, in the order of `__init__.pyi`; of `kv_pool.errors` all errors."""
    public = {}
    for path in sorted((ROOT / "kv_pool").rglob("__init__.py"), key=lambda path: path.parent):
        stub = path.with_suffix(".pyi")
        names = _read_all(ast.parse(path.read_text()))
        if stub.exists():
            imports = [each for each in ast.parse(stub.read_text()).body if isinstance(each, ast.ImportFrom)]
            names = [alias.name for each in imports for alias in each.names if alias.name[0] != "_"]
        if names:
            public[".".join(path.parent.relative_to(ROOT).parts)] = names
    errors = ast.parse((ROOT / "kv_pool" / "errors.py").read_text())
    public["kv_pool.errors"] = _read_all(errors) or [
        each.name for each in errors.body if isinstance(each, ast.ClassDef)
    ]
    return public


def split_names(docstring: str) -> str:
    """Return the docstring with each `first, last: text` in its lists as two entries with the same text."""

    def split(entry: re.Match[str]) -> str:
        return "\n".join(f"{entry['indent']}{name}: {entry['text']}" for name in entry["names"].split(", "))

    return _SEVERAL.sub(split, docstring)


def name_exceptions(docstring: str) -> str:
    """Return the docstring with `Exception:` before the entries of `Raises:` that name no class."""

    def name(section: re.Match[str]) -> str:
        lines = []
        is_named = True
        for line in section["entries"].splitlines():
            text = line.removeprefix(section["indent"] + "    ")
            if re.match(r"\w+: ", text):
                is_named = True
            elif text == text.lstrip():
                line = line.replace(text, f"    {text}" if not is_named else f"Exception: {text}")
                is_named = False
            lines.append(line)
        return f"{section['indent']}Raises:\n" + "\n".join(lines)

    return _RAISES.sub(name, docstring)


def _read_all(tree: ast.Module) -> list[str]:
    """Return the names in `__all__` but those with underscores, [] where there is none."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(statement.value)
            return [name for name in names if not name.startswith("_")]
    return []


def _read_summary(module: str) -> str:
    """Return the first paragraph of the module's docstring, in one line."""
    path = ROOT.joinpath(*module.split("."))
    source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    documentation = ast.get_docstring(ast.parse(source.read_text())) or ""
    return " ".join(documentation.partition("\n\n")[0].split())


def _find_path(module: str) -> str:
    return f"{FOLDER}/{module}.md"
