"""Checks of arguments: a wrong type raises `InvalidTypeError` with the argument's name.

In the compiled core the same checks run before a call reaches its function, by the declared types; an `int`
accepts NumPy's integers there. In plain Python a public method does them itself, in its first lines.
"""

from operator import index
from typing import Any, NoReturn

from kv_pool.errors import InvalidArgumentError, InvalidTypeError


def refuse_type(name: str, value: object, expected: str) -> NoReturn:
    """Raise `InvalidTypeError`. `expected` is a type's name, or several, joined by "or"."""
    types = [one.rpartition(".")[2] for one in expected.split(" or ")]
    raise InvalidTypeError(f"{name} is of type {type(value).__name__}; expected {' or '.join(types)}")


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
