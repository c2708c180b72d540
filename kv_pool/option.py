"""`Option`: the command-line option of a setting, given where the setting is declared.

A setting is declared once, as a field of a dataclass with an `Option`: in its annotation, or, if it has a
default, by `setting`. The field's documentation, its command-line option and help, its check
and its entry in a report are derived from it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from math import inf
from textwrap import fill
from typing import Any, TypeVar, get_type_hints

from kv_pool.errors import InvalidArgumentError, describe_known

_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Option:
    """A setting on a command line.

    Attributes:
        help: the help text, in full sentences.
        name: the option's name; None for the field's name.
        flags: all names as typed: of an option with two names, or of a switch without a negative form.
        aliases: other names; separate options in commands that pick single settings.
        metavar: the name of the value in the help; None for its type.
        min: smallest value; None for any.
        panel: heading under which the help lists it; None for the common options.
        choices: the allowed values; empty for any.
        known: returns values that completion offers if there are no `choices`; None for none.
        parse: converts the command line's text to the value; None if the text is the value.
        show: converts a value to text that `parse` accepts.
        is_argument: True for a positional argument.
    """

    help: str
    name: str | None = None
    metavar: str | None = None
    min: float | None = None
    panel: str | None = None
    choices: tuple[str, ...] = ()
    known: Callable[[], Iterable[str]] | None = None
    parse: Callable[[str], Any] | None = None
    show: Callable[[Any], str] = str
    is_argument: bool = False
    flags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


def setting(declared: str | Option, /, *, default: Any = MISSING, **attributes: Any) -> Any:
    """Return a dataclass field with an option; also the default of a command's parameter.

    Args:
        declared: the option, or the help text of a new one with these `attributes`.
        default: of the setting; without one it is required.
    """
    if not isinstance(declared, Option):
        declared = Option(declared, **attributes)
    return field(default=default, metadata={"option": declared})


def list_options(settings_class: type) -> Iterator[tuple[str, Any, Option]]:
    """Yield the name, the type and the option of each field that has an option."""
    types, hints = get_type_hints(settings_class), get_type_hints(settings_class, include_extras=True)
    for one in fields(settings_class):
        notes = [one.metadata.get("option"), *getattr(hints[one.name], "__metadata__", ())]
        yield from ((one.name, types[one.name], note) for note in notes if isinstance(note, Option))


def check_options(settings: object) -> None:
    """Raise InvalidArgumentError if a value is not one of its choices, below its minimum, or infinite.

    Options without choices and minimum are not checked.
    """
    for name, _, option in list_options(type(settings)):
        value = getattr(settings, name)
        if option.choices and value not in option.choices:
            raise InvalidArgumentError(
                f"unknown {name} {value!r}; {describe_known(str(value), option.choices)}"
            )
        if option.min is not None and value is not None and not option.min <= value < inf:
            needed = "finite" if value == inf else f"{option.min:g} or more"
            raise InvalidArgumentError(f"{name} is {value}; it must be {needed}")


def describe_options(settings_class: _Class) -> _Class:
    """Append the fields' options to the `Attributes` at the end of the class's docstring."""
    lines = [
        fill(f"{name}: {option.help}", 108, initial_indent=" " * 8, subsequent_indent=" " * 12)
        for name, _, option in list_options(settings_class)
    ]
    settings_class.__doc__ = "\n".join([(settings_class.__doc__ or "").rstrip(), *lines, "    "])
    return settings_class
