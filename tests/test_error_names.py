"""Errors keep their class and message in another process, by one table of names."""

import pkgutil
import re
from importlib import import_module

import msgspec
import pytest

import kv_pool
from kv_pool import errors
from kv_pool.control.messages import decode_answer, encode_error
from kv_pool.error_names import ERRORS_BY_NAME, find_error_name
from kv_pool.errors import ControlError, InvalidBlockError, KVPoolError, MigrationError
from kv_pool.migration.messages import decode_message, describe_failure, encode_message, raise_failure


def cross_nodes(error):
    with pytest.raises(KVPoolError) as raised:
        raise_failure(decode_message(encode_message(describe_failure(error))), "node 'a'")
    return raised.value


def cross_socket(error):
    with pytest.raises(KVPoolError) as raised:
        decode_answer(*encode_error(error), msgspec.Raw)
    return raised.value


WAYS = pytest.mark.parametrize("cross", [cross_nodes, cross_socket])


@WAYS
@pytest.mark.parametrize("name", sorted(ERRORS_BY_NAME))
def test_error_keeps_its_class_across_processes(cross, name):
    arrived = cross(ERRORS_BY_NAME[name]("7 blocks of 3"))
    assert type(arrived) is ERRORS_BY_NAME[name]
    assert str(arrived) == "7 blocks of 3"


def list_subclasses(kind):
    return {kind}.union(*map(list_subclasses, kind.__subclasses__()))


def test_every_error_of_the_package_has_a_name():
    for module in pkgutil.walk_packages(kv_pool.__path__, "kv_pool."):
        if "errors" in module.name.split("."):
            import_module(module.name)
    ours = {kind for kind in list_subclasses(KVPoolError) if kind.__module__.startswith("kv_pool")}
    assert ours == set(ERRORS_BY_NAME.values())
    assert {kind.__module__ for kind in ours} == {errors.__name__}


@WAYS
def test_unknown_subclass_becomes_its_nearest_base(cross):
    class WornBlockError(InvalidBlockError):
        pass

    assert find_error_name(WornBlockError("x")) == "InvalidBlockError"
    assert type(cross(WornBlockError("block 7"))) is InvalidBlockError


@pytest.mark.parametrize(("cross", "kind"), [(cross_nodes, MigrationError), (cross_socket, ControlError)])
def test_foreign_error_becomes_a_kv_pool_error(cross, kind):
    arrived = cross(KeyError("r"))
    assert type(arrived) is kind
    assert "KeyError: 'r'" in str(arrived)


def test_error_tree_in_the_docs_is_that_of_the_classes():
    drawn, path = {}, []
    for branch, name, built_in in re.findall(
        r"^    ([│├└─ ]*)(\w+Error)(?: \(([\w, ]+)\))?", errors.__doc__, re.M
    ):
        path[len(branch) // 4 :] = [name]
        drawn[name] = [*path[-2:-1], *built_in.split(", ")] if built_in else path[-2:-1]
    assert drawn.pop("KVPoolError") == []
    assert drawn == {
        cls.__name__: [base.__name__ for base in cls.__bases__]
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, KVPoolError) and cls is not KVPoolError
    }
