"""`takes`, `takes_given`: decorators that turn declared settings into the options of a command.

Every option is declared by an `Option` (`kv_pool/option.py`): as a field of a settings class, or by `setting`
as the default of a command's parameter.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, get_origin

import typer

from kv_pool.cli.logs import LogOptions
from kv_pool.errors import InvalidArgumentError
from kv_pool.option import Option, list_options
from kv_pool.quantities import parse_count

AS_JSON = Option("Print one JSON object, for programs.")

_Settings = TypeVar("_Settings")
_Command = Callable[..., None]
_Decorator = Callable[[_Command], _Command]


def takes(order: str = "", **found: object) -> _Decorator:
    """Decorate a command whose parameters are options, or made from options.

    A parameter whose type is a dataclass is made from the options of its fields. A later parameter of the
    same name as such an option replaces it.

    Args:
        order: names of options in the order of the help; by default all, as they are declared.
        found: values of fields that have no option; the command replaces them.
    """

    def decorate(command: _Command) -> _Command:
        parameters = inspect.signature(command).parameters.values()
        made: dict[str, Any] = {
            each.name: each.annotation for each in parameters if is_dataclass(each.annotation)
        }
        own = {each.name: each.default.metadata["option"] for each in parameters if each.name not in made}
        known: dict[str, inspect.Parameter] = {}
        for each in parameters:
            declared = _make_parameters(made[each.name]) if each.name in made else [_declare(each)]
            known.update((one.name, one) for one in declared)

        def run(**given: Any) -> None:
            values = {name: _parse(option, given.pop(name)) for name, option in own.items()}
            values |= {name: _make_settings(made[name], given, found) for name in made}
            command(**values)

        return _offer(command, run, known, order.split() or known)

    return decorate


def takes_given(settings_class: type, order: str = "") -> _Decorator:
    """Decorate a command whose first argument is a dict of these settings, with None for absent options.

    Args:
        order: as in `takes`.
    """
    defaults = settings_class()
    known: dict[str, inspect.Parameter] = {}
    options = {name: option for name, _, option in list_options(settings_class)}
    for name, value_type, option in list_options(settings_class):
        default = getattr(defaults, name)
        if get_origin(value_type) is Literal or option.parse is not None:
            value_type = str  # the settings reject other values with their own message
        texts = {name: f"{option.help} Default: {default}." if default else option.help}
        texts |= dict.fromkeys(option.aliases, f"Another name of --{name.replace('_', '-')}.")
        for each, text in texts.items():
            known[each] = _make_parameter(each, value_type | None, None, replace(option, help=text))

    def decorate(command: _Command) -> _Command:
        _, *own = inspect.signature(command).parameters.values()

        def run(**given: Any) -> None:
            others = {each.name: given.pop(each.name) for each in own}
            command({name: _parse(options.get(name), value) for name, value in given.items()}, **others)

        offered = known | {each.name: _declare(each) for each in own}
        return _offer(command, run, offered, order.split() or offered)

    return decorate


def _offer(
    command: _Command, run: _Command, known: dict[str, inspect.Parameter], order: Iterable[str]
) -> _Command:
    """Return a function with the name and the documentation of a command, and the parameters for typer.

    It applies the options of the log, which every command has, and calls `run`.
    """
    of_log = {each.name: each for each in _make_parameters(LogOptions)}

    def start(**given: Any) -> None:
        _make_settings(LogOptions, given, {}).apply()
        run(**{name: value for name, value in given.items() if name not in of_log})

    parameters = [*(known[name] for name in order), *of_log.values()]
    start.__name__, start.__doc__, start.__module__ = command.__name__, command.__doc__, command.__module__
    start.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    start.__annotations__ = {}  # typer reads those of the signature
    return start


def _declare(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return the parameter for typer of a command's parameter that has a `setting`."""
    declared = parameter.default
    return _make_parameter(
        parameter.name, parameter.annotation, declared.default, declared.metadata["option"]
    )


def _make_parameters(settings_class: type) -> Iterator[inspect.Parameter]:
    """Yield the parameters for these settings and for nested settings."""
    options = {name: (value_type, option) for name, value_type, option in list_options(settings_class)}
    for field in fields(settings_class):
        if field.name in options:
            value_type, option = options[field.name]
            yield _make_parameter(option.name or field.name, value_type, field.default, option)
        elif isinstance(field.type, type) and is_dataclass(field.type):
            yield from _make_parameters(field.type)


def _make_parameter(name: str, value_type: Any, default: object, option: Option) -> inspect.Parameter:
    """Return the parameter for an option. A whole number may be written as 10k."""
    flags = option.flags or (f"--{name.replace('_', '-')}",) * (value_type is bool)
    if option.parse is not None:
        value_type, default = (str | None, None) if default is None else (str, option.show(default))
    shared: dict[str, Any] = {"help": option.help, "metavar": option.metavar}
    if value_type in (int, int | None):
        least = "" if option.min is None else f">={option.min:g}"
        shared |= {"metavar": (option.metavar or "N") + least, "parser": _make_parser(option.min)}
    else:
        shared |= {"autocompletion": _complete(option.known or (lambda: option.choices)), "min": option.min}
    declared = (
        typer.Argument(**shared)
        if option.is_argument
        else typer.Option(*flags, rich_help_panel=option.panel, **shared)
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[value_type, declared],
    )


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


def _complete(list_names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a function with which a shell completes one of these names, or the last one of a list."""

    def find(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in list_names() if name.startswith(last)]

    return find


def _parse(option: Option | None, value: Any) -> Any:
    """Return the value of an option from what typer has read; None for an absent one."""
    if option is None or option.parse is None or value is None:
        return value
    return option.parse(value)


def _make_settings(
    settings_class: type[_Settings], given: dict[str, Any], found: dict[str, Any]
) -> _Settings:
    """Make settings from values by option name. Raises InvalidArgumentError."""
    options = {name: option for name, _, option in list_options(settings_class)}
    values = {}
    for field in fields(settings_class):  # type: ignore[arg-type]
        name, option = field.name, options.get(field.name)
        if option is not None and (option.name or name) in given:
            values[name] = _parse(option, given[option.name or name])
        elif name in found:
            values[name] = found[name]
        elif option is None and isinstance(field.type, type) and is_dataclass(field.type):
            values[name] = _make_settings(field.type, given, found)
    return settings_class(**values)
