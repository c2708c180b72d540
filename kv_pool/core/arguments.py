"""Checks of arguments: a wrong type raises `InvalidTypeError` with the argument's name.

In compiled modules the declared types of arguments are checked before a call reaches its function, and an
`int` accepts NumPy's integers; in plain Python the function checks them itself. Both use this module, as do
checks of what no declared type expresses.
"""

from collections.abc import Iterable
from operator import index
from typing import Any, NoReturn

from kv_pool.errors import InvalidArgumentError, InvalidTypeError


def refuse_type(name: str, value: object, expected: str) -> NoReturn:
    """Raise `InvalidTypeError`. `expected` is a type's name, or several, joined by "or"."""
    types = [one.rpartition(".")[2] for one in expected.split(" or ")]
    raise InvalidTypeError(f"{name} is of type {type(value).__name__}; expected {' or '.join(types)}")


def check_type(name: str, value: object, expected: type) -> None:
    """Raise `InvalidTypeError` unless the value is an instance of `expected`."""
    if not isinstance(value, expected):
        refuse_type(name, value, expected.__name__)


def check_number(name: str, value: Any) -> None:
    """Raise `InvalidTypeError` unless the value is a number that a float can hold, NumPy's included."""
    if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        refuse_type(name, value, "float")


def as_int(name: str, value: Any) -> int:
    """Return an integer of any type, such as NumPy's, as an int.

    Raises:
        InvalidTypeError: it is not an integer.
    """
    if isinstance(value, int):
        return value
    try:
        return index(value)
    except TypeError:
        pass
    refuse_type(name, value, "int")


def as_small_int(name: str, value: Any, expected: str) -> int:
    """As `as_int`, below 2**62: compiled code keeps such an integer without an object of its own."""
    number = as_int(name, value)
    if not -(2**62) <= number < 2**62:
        raise InvalidArgumentError(f"{name} is {number}; pass an int where it is this large")
    return number


def as_list(name: str, values: Iterable[Any]) -> list[Any]:
    """Return the list itself, or a new list of the elements of another iterable.

    Raises:
        InvalidTypeError: it is not iterable.
    """
    if isinstance(values, list):
        return values
    if isinstance(values, str):
        refuse_type(name, values, "a sequence")
    try:
        iterator = iter(values)
    except TypeError:
        refuse_type(name, values, "a sequence")
    return list(iterator)


def as_list_of(name: str, values: Iterable[Any], expected: type) -> list[Any]:
    """As `as_list`, all elements of which are instances of `expected`."""
    listed = as_list(name, values)
    for position, value in enumerate(listed):
        if type(value) is not expected and not isinstance(value, expected):
            refuse_type(f"{name}[{position}]", value, expected.__name__)
    return listed


def as_ints(name: str, values: Iterable[Any]) -> list[int]:
    """Return integers of any type as a new list of ints."""
    return [
        value if isinstance(value, int) else as_int(f"{name}[{position}]", value)
        for position, value in enumerate(as_list(name, values))
    ]
