"""Check arguments: a wrong type raises `InvalidTypeError` with the argument's name. Also refuse
copies, and calls of interrupted pools.

In compiled modules, the declared types of arguments are checked before a call reaches its function, and
`int` accepts NumPy integers. In plain Python, the function checks them itself. Both use this module, also for
checks that declared types cannot express.
"""

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, NoReturn

from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, InvalidTypeError, PoolInterruptedError
from kv_pool.ids import RequestId


def refuse_type(name: str, value: object, expected: str) -> NoReturn:
    """Raise `InvalidTypeError`. `expected` is a type's name, or several joined by "or"."""
    types = [one.rpartition(".")[2] for one in expected.split(" or ")]
    raise InvalidTypeError(f"{name} is of type {type(value).__name__}; expected {' or '.join(types)}")


def check_type(name: str, value: object, expected: type) -> None:
    """Raise `InvalidTypeError` unless the value is an instance of `expected`."""
    if not isinstance(value, expected):
        refuse_type(name, value, expected.__name__)


def check_number(name: str, value: Any) -> None:
    """Raise `InvalidTypeError` unless the value is a real number; NumPy numbers are accepted."""
    if not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        refuse_type(name, value, "float")


def as_int(name: str, value: Any) -> int:
    """Return an integer of any type, such as a NumPy integer, as an int.

    Raises:
        InvalidTypeError: the value is not an integer.
    """
    if isinstance(value, int):
        return value
    try:
        return index(value)
    except TypeError:
        pass
    refuse_type(name, value, "int")


def as_count(name: str, value: Any, least: int = 0) -> int:
    """Return a count of any integer type as an int.

    Raises:
        InvalidTypeError: the value is not an integer.
        InvalidArgumentError: it is less than `least`.
    """
    count = as_int(name, value)
    if count < least:
        raise InvalidArgumentError(f"{name} is {count}; it is a count, {least} or more")
    return count


def as_small_int(name: str, value: Any, expected: str) -> int:
    """Return an integer as an int in -2**62..2**62-1, which compiled code stores unboxed.

    Called by compiled code, for arguments that are declared as int.

    Raises:
        InvalidTypeError: the value is not an integer.
        InvalidArgumentError: the value is out of range.
    """
    number = as_int(name, value)
    if not -(2**62) <= number < 2**62:
        raise InvalidArgumentError(f"{name} is {number}; a number this large must be a Python int")
    return number


def as_list(name: str, values: Iterable[Any]) -> list[Any]:
    """Return the list itself, or a new list of the elements of another iterable.

    Raises:
        InvalidTypeError: the value is not iterable, or is a str.
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
    """Return `as_list(...)` after checking that all elements are instances of `expected`."""
    listed = as_list(name, values)
    for position, value in enumerate(listed):
        if type(value) is not expected and not isinstance(value, expected):
            refuse_type(f"{name}[{position}]", value, expected.__name__)
    return listed


def as_ints(name: str, values: Iterable[Any]) -> list[int]:
    """Return integers of any type as a new list of ints. Raises: as `as_int`."""
    return [
        value if isinstance(value, int) else as_int(f"{name}[{position}]", value)
        for position, value in enumerate(as_list(name, values))
    ]


def refuse_copy(thing: object) -> NoReturn:
    """Raise `InvalidTypeError` for `pickle`, `copy` and `deepcopy` of a pool or an object with its blocks."""
    raise InvalidTypeError(
        f"a {type(thing).__name__} cannot be pickled or copied: its blocks are known by identity. To save "
        "the cached content of a pool, use kv_pool.tiers.pool_dump.dump_pool(path, pool), and load_pool() "
        "into a new pool"
    )


def check_ours(block: KVCacheBlock, owner: Any, call: str) -> None:
    """Raise InvalidBlockError if `block` belongs to another pool. Bare and null blocks are accepted."""
    if block.owner is not owner and block.owner is not None and not block.is_null:
        raise InvalidBlockError(
            f"block {block.block_id} belongs to another pool; {call} takes blocks of this one"
        )


def raise_typed(error: Exception, listed: Sequence[object], call: str) -> NoReturn:
    """Raise `error`, or an InvalidTypeError if an element of `listed` is not a block."""
    for position, element in enumerate(listed):
        if not isinstance(element, KVCacheBlock):
            raise InvalidTypeError(
                f"{call} takes blocks; element {position} is a {type(element).__name__}"
            ) from error
    raise error


def refuse_interrupted() -> NoReturn:
    """Raise PoolInterruptedError."""
    raise PoolInterruptedError(
        "an earlier call of this pool was interrupted. Call repair() of the manager or the adapter, which "
        "keeps the blocks of all requests and empties the prefix cache; for a bare BlockPool, repair(blocks) "
        "with the blocks that you hold, each once per reference"
    )


def get_request_id(name: str, request: object) -> RequestId:
    """Return the id of a request. Raise InvalidTypeError if `request` is not a request."""
    unchecked: Any = request
    try:
        request_id = unchecked.request_id
    except AttributeError:
        refuse_type(name, request, "a request")
    if not isinstance(request_id, str):
        refuse_type(f"{name}.request_id", request_id, "str")
    return RequestId(request_id)
