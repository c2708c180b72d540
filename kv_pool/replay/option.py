"""`Option`: what a command line says of a setting, in the setting's annotation.

A setting is declared once, as a field of a settings class with an `Option`. The field's documentation, its
option and help on command lines, the check against `choices`, and its entry in a report follow from that.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from textwrap import fill
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Option:
    """A setting on a command line.

    Attributes:
        help: what it means, in whole sentences.
        name: if it is not the field's name.
        flags: all names as they are typed, of a switch that has no way back.
        aliases: other names, options of their own where settings are taken one by one.
        metavar: what its value is called in the help; None for its type.
        min: smallest value that the command line takes; None for any.
        panel: heading of the options beside which it is listed; None for the common ones.
        choices: its values, where these are few.
        parse: reads its value, where the command line's text is not the value itself.
        show: writes a value as `parse` reads it.
        is_argument: it is an argument without a name.
    """

    help: str
    name: str | None = None
    metavar: str | None = None
    min: float | None = None
    panel: str | None = None
    choices: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    show: Callable[[Any], str] = str
    is_argument: bool = False
    flags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


def list_options(settings_class: type) -> Iterator[tuple[str, Any, Option]]:
    """Yield the name, the type and the option of each field that has an option."""
    types = get_type_hints(settings_class)
    for name, hint in get_type_hints(settings_class, include_extras=True).items():
        if get_origin(hint) is Annotated:
            yield from ((name, types[name], note) for note in get_args(hint)[1:] if isinstance(note, Option))


def describe_options(settings_class: _Class) -> _Class:
    """Append the fields' options to the `Attributes` at the end of the class's docstring."""
    lines = [
        fill(f"{name}: {option.help}", 108, initial_indent=" " * 8, subsequent_indent=" " * 12)
        for name, _, option in list_options(settings_class)
    ]
    settings_class.__doc__ = "\n".join([(settings_class.__doc__ or "").rstrip(), *lines, "    "])
    return settings_class
