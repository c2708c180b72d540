"""Calls each compiled method and attribute with objects of other classes; prints what did not refuse them."""

import importlib
import inspect
import pkgutil

import kv_pool
from kv_pool import BlockPool

LEFT_OUT = {"kv_pool.__main__"}


class Foreign:
    pass


def list_compiled_classes():
    for found in pkgutil.walk_packages(kv_pool.__path__, "kv_pool."):
        if found.name in LEFT_OUT:
            continue
        try:
            module = importlib.import_module(found.name)
        except ImportError:  # of something that is not installed here; none of these is compiled
            continue
        if not (module.__file__ or "").endswith(".py"):
            for member in list(vars(module).values()):
                if inspect.isclass(member) and member.__module__ == found.name:
                    yield member


def list_calls(owner, member):
    """Each way to use a member without an instance, as a function of the object in its place."""
    kind = type(member).__name__
    if kind == "compiled_method":
        try:
            parameters = list(inspect.signature(member).parameters.values())[1:]
        except ValueError:  # mypyc's own
            parameters = []
        arguments = [None for one in parameters if one.default is one.empty]
        yield lambda other: member(other, *arguments)
        yield lambda other: member.__get__(other, type(other))(*arguments)
    elif kind == "compiled_property":
        yield lambda other: member.__get__(other, type(other))
        yield lambda other: member.__set__(other, None)
        yield lambda other: member.__delete__(other)
    elif kind == "wrapper_descriptor":
        yield lambda other: member(other)


def main():
    pool = BlockPool(4, True, 16)
    foreign = [Foreign(), 3, "text", [], object, pool, pool.blocks[1], pool.free_block_queue]
    num_refused = 0
    for owner in list_compiled_classes():
        for name, member in list(vars(owner).items()):
            where = f"{owner.__module__}.{owner.__name__}.{name}"
            for call in list_calls(owner, member):
                for other in foreign:
                    if owner in type(other).__mro__:
                        continue
                    try:
                        call(other)
                    except TypeError as error:
                        num_refused += 1
                        is_about_self = any(word in str(error) for word in ("got", "descriptor", "self"))
                        if is_about_self or getattr(owner, "_is_protocol", False):
                            continue
                        print(f"{where}: {error}")
                    else:
                        if not getattr(owner, "_is_protocol", False):  # its methods do nothing
                            print(f"{where} took a {type(other).__name__}")
    print(f"{num_refused > 10_000=}")


if __name__ == "__main__":
    main()
