"""Errors of one node told to another, and raised there as what they were."""

from typing import NoReturn

import kv_pool.errors as errors
from kv_pool.errors import KVPoolError, MigrationError
from kv_pool.migration.messages import CallFailed

_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, KVPoolError)
}


def describe_failure(error: Exception) -> CallFailed:
    """What to answer instead. An error that is none of kv_pool's is told as a MigrationError."""
    kind = type(error).__name__
    if _KINDS.get(kind) is type(error):
        return CallFailed(kind, str(error))
    return CallFailed("MigrationError", f"{kind}: {error}")


def raise_failure(failed: CallFailed, peer: str) -> NoReturn:
    """Raise what it tells of; a name that is no error of kv_pool here, as a MigrationError."""
    kind = _KINDS.get(failed.error)
    if kind is None:
        raise MigrationError(f"{peer}: {failed.error}: {failed.message}")
    raise kind(failed.message)
