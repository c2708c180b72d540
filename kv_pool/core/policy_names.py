"""`find_policy`: a cache policy by name, by module or file, or as a class."""

import importlib
import importlib.util
import os
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Final, NamedTuple, NoReturn, cast

from kv_pool.core.cache_policy import LRU, CachePolicy
from kv_pool.errors import InvalidArgumentError

POLICY_GROUP: Final = "kv_pool.policies"
"""The entry point group in which installed packages name their policies."""

FLAT: Final = "flat:"

POLICY_FOLDER: Final = "kv_pool.policies"


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


def find_policy(policy: Any) -> PolicyChoice:
    """Return the policy that is meant.

    Args:
        policy: one of

            "s3fifo"            a policy of `kv_pool/policies`, or "lru"
            "theirs"            an entry point of the group `kv_pool.policies`
            "package.mod:Mine"  a class of a module
            "mine.py:Mine"      a class of a file
            "flat:..."          any of these, with each block as an object of its own
            Mine                a class derived from `CachePolicy`, or a function that returns a new policy
    Raises:
        InvalidArgumentError: there is none, or it cannot be imported.
    """
    if not isinstance(policy, str):
        if isinstance(policy, PolicyChoice):
            return policy
        if not callable(policy):
            raise InvalidArgumentError(
                f"the cache policy is a {type(policy).__name__}; expected a name, a class derived from "
                "CachePolicy, or a function that returns one"
            )
        return PolicyChoice(getattr(policy, "__qualname__", repr(policy)), policy, False)
    if policy.startswith(FLAT):
        found = find_policy(policy[len(FLAT) :])
        return PolicyChoice(policy, found.make, True)
    if policy == "lru":
        return PolicyChoice(policy, LRU, False)
    place, separator, name = policy.rpartition(":")
    if separator:
        module = load_file(place, policy) if place.endswith(".py") else load_module(place, policy)
        return PolicyChoice(policy, find_class(module, name, policy), False)
    if policy in list_policies():
        module = load_module(f"{POLICY_FOLDER}.{policy}", policy)
        for made in vars(module).values():
            if is_policy(made) and made.__module__ == module.__name__:
                return PolicyChoice(policy, made, False)
    for entry in entry_points(group=POLICY_GROUP, name=policy):
        try:
            made = entry.load()
        except Exception as error:
            refuse(policy, f"the entry point {entry.value} raised {type(error).__name__}: {error}", error)
        return find_policy(made)._replace(name=policy)
    refuse(policy, f"known are {', '.join(['lru', *list_policies()])}, module:Class and file.py:Class")


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
        refuse(policy, f"importing {name} raised {type(error).__name__}: {error}", error)


def load_file(path: str, policy: str) -> Any:
    """Run a file as a module, or raise InvalidArgumentError."""
    spec = importlib.util.spec_from_file_location("kv_pool_policy_file", path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        refuse(policy, f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        refuse(policy, f"running {path} raised {type(error).__name__}: {error}", error)
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
