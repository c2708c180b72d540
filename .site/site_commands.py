"""The command reference: one page for each sub-command of `kv-pool`, made from its declared options."""

import inspect
import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from kv_pool.cli.sub_commands import make_command
from kv_pool.version import __version__

FOLDER = "reference/commands"
_TYPES = {int: "INTEGER", float: "NUMBER", str: "TEXT"}

_INDEX = """\
# The command kv-pool

{about}

`python -m kv_pool` is the same command. Each sub-command prints its own options with `--help`.

{commands}

## Options of kv-pool itself

{options}

## Exit status

| status | meaning |
|---|---|
| 0 | success |
| 2 | refused: an invalid option, an unreadable file, a pool or node that does not answer; stderr says why |
| 129, 130, 143 | ended by a closed terminal, by Ctrl-C, by SIGTERM |
"""


def list_command_pages() -> list[tuple[str, str, str]]:
    """Return (path, title, summary) of the index and of each sub-command's page, in the order of the help."""
    command = _read_command()
    pages = [
        (f"{FOLDER}/index.md", "All commands", "the sub-commands of kv-pool, its own options, exit status")
    ]
    for name, sub_command in list_commands(command).items():
        pages.append((find_path(name), f"kv-pool {name}", _summarize(sub_command)))
    return pages


def list_commands(command: Any, prefix: str = "") -> dict[str, Any]:
    """Return the sub-commands by name, and those of groups by the names of both: `trace info`."""
    found = {}
    for name, each in command.commands.items():
        inner = list_commands(each, f"{prefix}{name} ") if hasattr(each, "commands") else {}
        found.update(inner or {f"{prefix}{name}": each})
    return found


def find_path(name: str) -> str:
    """Return the path of a sub-command's page."""
    return f"{FOLDER}/{name.replace(' ', '-')}.md"


def make_command_pages() -> dict[str, str]:
    """Return the Markdown of each page by its path."""
    command = _read_command()
    commands = list_commands(command)
    rows = [
        f"| [`kv-pool {name}`]({name.replace(' ', '-')}.md) | {_summarize(each)} |"
        for name, each in commands.items()
    ]
    index = _INDEX.format(
        about=command.help,
        commands="\n".join(["| command | what it does |", "|---|---|", *rows]),
        options=_make_table(command, command.params),
    )
    pages = {f"{FOLDER}/index.md": index}
    for name, each in commands.items():
        pages[find_path(name)] = _make_page(name, each)
    return pages


def _read_command() -> Any:
    return make_command(__version__)


def _summarize(command: Any) -> str:
    return " ".join(command.help.partition("\n\n")[0].split())


def _make_page(name: str, command: Any) -> str:
    shown = [option for option in command.params if not option.hidden]
    arguments = [option for option in shown if option.param_type_name == "argument"]
    panels: dict[str, list[Any]] = {}
    for option in shown:
        if option not in arguments:
            panels.setdefault(option.rich_help_panel or "Options", []).append(option)
    lines = [f"# kv-pool {name}", "", inspect.cleandoc(command.help), ""]
    lines += ["```sh", " ".join(["kv-pool", name, *_list_usage(arguments, shown)]), "```", ""]
    if arguments:
        lines += ["## Arguments", "", _make_table(command, arguments), ""]
    for panel, options in panels.items():
        lines += [f"## {panel}", "", _make_table(command, options), ""]
    if command.epilog:
        lines += [command.epilog, ""]
    return "\n".join(lines)


def _list_usage(arguments: list[Any], shown: list[Any]) -> Iterator[str]:
    """Yield the words behind the command: required options, arguments, the rest as `[OPTIONS]`."""
    for option in shown:
        if option.required and option not in arguments:
            yield f"{option.opts[0]} {option.metavar or option.name.upper()}"
    if len(shown) > len(arguments):
        yield "[OPTIONS]"
    for argument in arguments:
        name = argument.metavar or argument.name.upper()
        yield name if argument.required else f"[{name}]"


def _make_table(command: Any, options: list[Any]) -> str:
    """Return a row for each option, without the columns in which no row has anything."""
    types = _read_types(command)
    rows = [(options[0].param_type_name, "value", "default", "meaning")]
    for option in options:
        value_type, is_repeated = types.get(option.name, (bool, False))
        default, meaning = _split_default(option)
        rows.append(
            (_name(option), _describe_value(option, value_type, is_repeated), default, _escape(meaning))
        )
    used = [column for column in range(4) if any(row[column] for row in rows[1:])]
    lines = [f"| {' | '.join(row[column] for column in used)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(used) + "|", *lines[1:]])


def _read_types(command: Any) -> dict[str, tuple[type, bool]]:
    """Return for each parameter, by name, the type of its values and whether it is repeatable."""
    types = {}
    for name, parameter in inspect.signature(command.callback).parameters.items():
        annotation = parameter.annotation
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        if get_origin(annotation) in (Union, UnionType):
            (annotation,) = (each for each in get_args(annotation) if each is not type(None))
        is_repeated = get_origin(annotation) is list
        types[name] = get_args(annotation)[0] if is_repeated else annotation, is_repeated
    return types


def _name(option: Any) -> str:
    if option.param_type_name == "argument":
        return _make_code(option.metavar or option.name.upper())
    return "<br>".join(_make_code(flag) for flag in (*option.opts, *option.secondary_opts))


def _describe_value(option: Any, value_type: type, is_repeated: bool) -> str:
    if value_type is bool:
        return ""
    is_named = option.metavar and option.param_type_name == "option"
    words = [_make_code(option.metavar if is_named else _TYPES.get(value_type, "TEXT"))]
    if option.min is not None:
        words.append(f"from&nbsp;{option.min:g}")
    if option.max is not None:
        words.append(f"to&nbsp;{option.max:g}")
    if is_repeated:
        words.append("repeatable")
    return " ".join(words)


def _split_default(option: Any) -> tuple[str, str]:
    """Return the default and the help without it: some commands state the default in their help."""
    meaning = re.sub(r"\\(\[)", r"\1", option.help or "")  # without rich's escapes
    if option.required:
        return "required", meaning
    stated = re.fullmatch(r"(?P<meaning>.*)\. Default: (?P<default>\S+)\.", meaning, re.DOTALL)
    if stated is not None:
        return _make_code(stated["default"]), f"{stated['meaning']}."
    is_shown = option.show_default and option.default not in (None, False, "")
    return _make_code(str(option.default)) if is_shown else "", meaning


def _make_code(text: str) -> str:
    """Return the text as code in a cell of a Markdown table."""
    return "`" + text.replace("|", "\\|") + "`"


def _escape(text: str) -> str:
    """Return the text as a cell of a Markdown table, without markup of its own."""
    return re.sub(r"([|<*_\[\]])", r"\\\1", " ".join(text.split()))
