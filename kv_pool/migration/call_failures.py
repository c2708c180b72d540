"""`CallFailed` from an error that a node raises, and the same error from it at another node."""

from typing import NoReturn

from kv_pool.error_names import ERRORS_BY_NAME, find_error_name
from kv_pool.errors import MigrationError
from kv_pool.migration.messages import CallFailed


def describe_failure(error: Exception) -> CallFailed:
    """The reply instead of a result. Errors of other libraries become MigrationErrors."""
    name = find_error_name(error)
    if name is None:
        return CallFailed("MigrationError", f"{type(error).__name__}: {error}")
    return CallFailed(name, str(error))


def raise_failure(failed: CallFailed, peer: str) -> NoReturn:
    """Raise the error; a MigrationError where this version of kv_pool has none of that name."""
    kind = ERRORS_BY_NAME.get(failed.error)
    if kind is None:
        raise MigrationError(f"{peer}: {failed.error}: {failed.message}")
    raise kind(failed.message)
