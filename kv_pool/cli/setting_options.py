"""`takes`, `takes_given`: decorators that turn the fields of settings into options of a command.

The settings declare the options (`kv_pool/option.py`); a command lists those that it offers, in order.
Commands to a running pool have no settings: they share `Socket`, `Node` and `Json`.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, get_origin

import typer

from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import NodeName
from kv_pool.option import Option, list_options
from kv_pool.quantities import parse_count

Socket = Annotated[
    str | None,
    typer.Option(help="The pool's control socket. Default: the socket of this user's kv-pool serve."),
]
Node = Annotated[
    NodeName | None,
    typer.Option(metavar="NAME", parser=NodeName, help="The node to connect to: its kv-pool serve --name."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


_Settings = TypeVar("_Settings")
_Command = Callable[..., None]
_Decorator = Callable[[_Command], _Command]


def takes(settings_class: type[_Settings], order: str, **found: object) -> _Decorator:
    """Decorate a command whose first argument is made from options of these settings.

    A further parameter whose type is a dataclass with options is made from these options in the same way.

    Args:
        order: names of options in the order of the help, both of the settings and of the command's own
            parameters.
        found: values of fields that have no option; the command replaces them.
    """
    make_settings = partial(_make_settings, settings_class, found=found)
    return _decorate(make_settings, _make_parameters(settings_class), order)


def takes_given(settings_class: type, order: str) -> _Decorator:
    """Decorate a command whose first argument is a dict of these settings, with None for absent options."""
    defaults = settings_class()
    parameters = {}
    parsers = {name: option.parse for name, _, option in list_options(settings_class) if option.parse}

    def parse(given: dict[str, Any]) -> dict[str, Any]:
        texts = {name: given[name] for name in parsers if given.get(name) is not None}
        return given | {name: parsers[name](text) for name, text in texts.items()}

    for name, value_type, option in list_options(settings_class):
        default = getattr(defaults, name)
        if get_origin(value_type) is Literal or name in parsers:
            value_type = str  # the settings reject other values with their own message
        text = f"{option.help} Default: {default}." if default else option.help
        parameters[name] = _make_parameter(name, value_type | None, None, replace(option, help=text))
        for alias in option.aliases:
            other = replace(option, help=f"Another name of --{name.replace('_', '-')}.")
            parameters[alias] = _make_parameter(alias, value_type | None, None, other)
    return _decorate(parse, parameters, order)


def _decorate(
    make_first: Callable[[dict[str, Any]], object], parameters: dict[str, inspect.Parameter], order: str
) -> _Decorator:
    def decorate(command: _Command) -> _Command:
        _, *own = inspect.signature(command).parameters.values()
        known = {**parameters, **{each.name: each for each in own}}
        made: dict[str, Any] = {each.name: each.annotation for each in own if is_dataclass(each.annotation)}
        for settings_class in made.values():
            known.update(_make_parameters(settings_class))

        def run(**given: Any) -> None:
            others = {name: _make_settings(made[name], given, {}) for name in made}
            others |= {each.name: given.pop(each.name) for each in own if each.name not in made}
            command(make_first(given), **others)

        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        by_keyword = [known[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in order.split()]
        run.__signature__ = inspect.Signature(by_keyword)  # type: ignore[attr-defined]
        run.__annotations__ = {}  # typer reads those of the signature
        return run

    return decorate


def _make_parameters(settings_class: type) -> dict[str, inspect.Parameter]:
    """Return the parameters for these settings and for nested settings, by option name."""
    parameters = {}
    options = {name: (value_type, option) for name, value_type, option in list_options(settings_class)}
    for field in fields(settings_class):
        if field.name in options:
            value_type, option = options[field.name]
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            if option.parse is not None:
                value_type, default = str, option.show(default)
            name = option.name or field.name
            parameters[name] = _make_parameter(name, value_type, default, option)
        elif isinstance(field.type, type) and is_dataclass(field.type):
            parameters.update(_make_parameters(field.type))
    return parameters


def _make_parameter(name: str, value_type: Any, default: object, option: Option) -> inspect.Parameter:
    flags = option.flags or (f"--{name.replace('_', '-')}",) * (value_type is bool)
    annotation = declare(value_type, option, *flags)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def declare(value_type: Any, option: Option, *flags: str) -> Any:
    """Return the annotation of a command's parameter for an option. A whole number may be written as 10k."""
    if value_type in (int, int | None):
        return Annotated[
            value_type,
            count_option(option.help, option.min, *flags, panel=option.panel, metavar=option.metavar),
        ]
    shared: dict[str, Any] = {
        "help": option.help,
        "metavar": option.metavar,
        "autocompletion": complete(option.known or (lambda: option.choices)),
    }
    if option.is_argument:
        return Annotated[value_type, typer.Argument(**shared)]
    return Annotated[value_type, typer.Option(*flags, rich_help_panel=option.panel, min=option.min, **shared)]


def count_option(
    text: str, least: float | None, *flags: str, panel: str | None = None, metavar: str | None = None
) -> Any:
    """Return typer's option of a whole number, which may be written as 10k, and is at least `least`."""
    shown = (metavar or "N") + ("" if least is None else f">={least:g}")
    return typer.Option(*flags, help=text, metavar=shown, parser=_make_parser(least), rich_help_panel=panel)


def _make_parser(least: float | None) -> Callable[[str | int], int]:
    """Return a function that parses a whole number, at least `least`."""

    def parse(text: str | int) -> int:
        try:
            number = int(text)
        except ValueError:
            try:
                number = parse_count(str(text))
            except InvalidArgumentError as error:
                raise typer.BadParameter(str(error)) from error
        if least is not None and number < least:
            raise typer.BadParameter(f"{number} is too small; it must be {least:g} or more")
        return number

    return parse


def complete(list_names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a function with which a shell completes one of these names, or the last one of a list."""

    def find(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in list_names() if name.startswith(last)]

    return find


def _make_settings(
    settings_class: type[_Settings], given: dict[str, Any], found: dict[str, Any]
) -> _Settings:
    """Make settings from values by option name. Raises InvalidArgumentError."""
    values = dict(found)
    options = {name: option for name, _, option in list_options(settings_class)}
    for name, option in options.items():
        text = given.get(option.name or name, MISSING)
        if text is not MISSING:
            values[name] = text if option.parse is None else option.parse(text)
    for field in fields(settings_class):  # type: ignore[arg-type]
        if field.name not in options and isinstance(field.type, type) and is_dataclass(field.type):
            values[field.name] = _make_settings(field.type, given, {})
    return settings_class(**values)
