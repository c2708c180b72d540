"""`find_policy`: a cache policy by name, by module or file, or as a class."""

import importlib
import importlib.util
import os
import tokenize
import traceback
import types
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn, cast

from kv_pool.core.arguments import refuse_type
from kv_pool.core.cache_policy import LRU, CachePolicy
from kv_pool.errors import InvalidArgumentError, describe_known

POLICY_GROUP: Final = "kv_pool.policies"
"""The entry point group in which installed packages name their policies."""

FLAT: Final = "flat:"

POLICY_FOLDER: Final = "kv_pool.policies"

_LIBRARY: Final = os.path.dirname(os.__file__)
_CORE: Final = os.path.join("kv_pool", "core", "")


class PolicyChoice(NamedTuple):
    """A cache policy as a pool opens it.

    Attributes:
        name: the name, for errors and reports.
        make: returns a new policy.
        is_flat: each block is an object of its own.
    """

    name: str
    make: Callable[[], CachePolicy]
    is_flat: bool


def find_policy(policy: Any, others: tuple[str, ...] = ()) -> PolicyChoice:
    """Return the policy that is meant.

    Args:
        policy: one of

            "s3fifo"            a policy of `kv_pool/policies`, or "lru"
            "theirs"            an entry point of the group `kv_pool.policies`
            "package.mod:Mine"  a class of a module
            "mine.py:Mine"      a class of a file
            "flat:..."          any of these, with each block as an object of its own
            Mine                a class derived from `CachePolicy`, or a function that returns a new policy
        others: names that the caller knows besides, for the error.
    Raises:
        InvalidArgumentError: there is none, or it cannot be imported.
        InvalidTypeError: `policy` is none of these.
    """
    if not isinstance(policy, str):
        if isinstance(policy, PolicyChoice):
            return policy
        if not callable(policy):
            refuse_type(
                "policy", policy, "a name, a class derived from CachePolicy, or a function that makes one"
            )
        return PolicyChoice(getattr(policy, "__qualname__", repr(policy)), policy, False)
    if policy.startswith(FLAT):
        found = find_policy(policy[len(FLAT) :], others)
        return PolicyChoice(policy, found.make, True)
    if policy == "lru":
        return PolicyChoice(policy, LRU, False)
    place, separator, name = policy.rpartition(":")
    if separator:
        if place.endswith(".py"):
            return read_policy_text(policy, read_file(place, policy))
        return PolicyChoice(policy, find_class(load_module(place, policy), name, policy), False)
    if policy in list_policies():
        module = load_module(f"{POLICY_FOLDER}.{policy}", policy)
        for made in vars(module).values():
            if is_policy(made) and made.__module__ == module.__name__:
                return PolicyChoice(policy, made, False)
    from importlib.metadata import entry_points  # 25 ms, which most pools do not need

    for entry in entry_points(group=POLICY_GROUP, name=policy):
        try:
            made = entry.load()
        except Exception as error:
            refuse(policy, f"the entry point {entry.value} {describe_raised(error)}", error)
        return find_policy(made)._replace(name=policy)
    known = describe_known(policy, ["lru", *list_policies(), *others])
    refuse(policy, f"{known}, module:Class and file.py:Class")


def find_file(policy: str) -> str | None:
    """Return the path of a policy `file.py:Class`, flat or not; None for other policies."""
    place, _, _ = policy.removeprefix(FLAT).rpartition(":")
    return place if place.endswith(".py") else None


def read_policy_text(policy: str, text: str) -> PolicyChoice:
    """Return the policy `file.py:Class`, flat or not, where `text` is the text of the file.

    Raises:
        InvalidArgumentError: running the text raises, or it has no such class.
    """
    place, _, name = policy.removeprefix(FLAT).rpartition(":")
    made = find_class(load_text(text, place, policy), name, policy)
    return PolicyChoice(policy, made, policy.startswith(FLAT))


def list_policies() -> list[str]:
    """Return the names of the policies in `kv_pool/policies`, without "lru"."""
    spec = importlib.util.find_spec(POLICY_FOLDER)
    names: set[str] = set()
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        names |= {name.split(".")[0] for name in os.listdir(folder) if name.endswith((".py", ".so", ".pyd"))}
    return sorted(name for name in names if not name.startswith("_"))


def load_module(name: str, policy: str) -> Any:
    """Import a module, or raise InvalidArgumentError."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        refuse(policy, f"importing {name} {describe_raised(error)}", error)


def read_file(path: str, policy: str) -> str:
    """Return the text of a file, or raise InvalidArgumentError."""
    if not os.path.isfile(path):
        refuse(policy, f"there is no file {path}")
    try:
        with tokenize.open(path) as file:  # in the encoding that the file declares
            return file.read()
    except (OSError, SyntaxError, UnicodeError) as error:
        refuse(policy, f"reading {path} {describe_raised(error)}", error)


def load_text(text: str, path: str, policy: str) -> Any:
    """Run the text of a file as a module, or raise InvalidArgumentError."""
    module = types.ModuleType("kv_pool_policy_file")
    module.__file__ = path
    try:
        exec(compile(text, path, "exec", dont_inherit=True), vars(module))
    except Exception as error:
        refuse(policy, f"running {path} {describe_raised(error)}", error)
    return module


def find_class(module: Any, name: str, policy: str) -> Callable[[], CachePolicy]:
    """Return a policy class of a module, or raise InvalidArgumentError."""
    found: Any = getattr(module, name, None)
    if not is_policy(found):
        refuse(policy, f"{name} is not a class derived from kv_pool.CachePolicy there")
    return cast(Callable[[], CachePolicy], found)


def is_policy(found: Any) -> bool:
    """Return True for a class of policies."""
    return isinstance(found, type) and issubclass(found, CachePolicy) and found is not CachePolicy


def refuse(policy: str, reason: str, error: BaseException | None = None) -> NoReturn:
    """Raise InvalidArgumentError for a policy that cannot be found."""
    raise InvalidArgumentError(f"there is no cache policy {policy!r}: {reason}") from error


def describe_raised(error: Exception) -> str:
    """Return what a policy raised, and the file and line of its own code: `raised KeyError: 3 (mine.py:12)`.

    The line is the innermost one outside of Python's library and of this package; none if there is no such.
    """
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        name = frame.filename
        is_library = name.startswith(_LIBRARY) and "-packages" not in name
        if not is_library and not name.startswith("<") and _CORE not in name:
            where = f" ({name}:{frame.lineno})"
    return f"raised {type(error).__name__}: {error}{where}"
