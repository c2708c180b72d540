"""Conversion of an error to a `CallFailed` message, and back to the error at the calling node."""

from typing import NoReturn

from kv_pool.error_names import ERRORS_BY_NAME, find_error_name
from kv_pool.errors import MigrationError
from kv_pool.migration.messages import CallFailed


def describe_failure(error: Exception) -> CallFailed:
    """Return the reply for an error. Errors of other libraries become a MigrationError."""
    name = find_error_name(error)
    if name is None:
        return CallFailed("MigrationError", f"{type(error).__name__}: {error}")
    return CallFailed(name, str(error))


def raise_failure(failed: CallFailed, peer: str) -> NoReturn:
    """Raise the error that a reply names; MigrationError if this version of kv_pool does not have it."""
    kind = ERRORS_BY_NAME.get(failed.error)
    if kind is None:
        raise MigrationError(f"{peer}: {failed.error}: {failed.message}")
    raise kind(failed.message)
