"""`refuse_copy`: reject copies of objects that are known by identity."""

from typing import NoReturn

from kv_pool.errors import InvalidTypeError


def refuse_copy(thing: object) -> NoReturn:
    """Raise `InvalidTypeError` for `pickle`, `copy` and `deepcopy` of a pool or an object with its blocks."""
    raise InvalidTypeError(
        f"a {type(thing).__name__} cannot be pickled or copied: its blocks are known by identity. To save "
        "the cached content of a pool, use kv_pool.tiers.pool_dump.dump_pool(path, pool), and load_pool() "
        "into a new pool"
    )
