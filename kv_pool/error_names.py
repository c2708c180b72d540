"""`ERRORS_BY_NAME`: the errors of kv_pool by class name, for reporting them between processes."""

import kv_pool.errors as errors
from kv_pool.errors import KVPoolError

ERRORS_BY_NAME: dict[str, type[KVPoolError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, KVPoolError)
}
"""Each class can be constructed from its message alone."""


def find_error_name(error: Exception) -> str | None:
    """Return the name of the error's class, or of its nearest base class in `ERRORS_BY_NAME`.

    None for errors of other libraries.
    """
    for kind in type(error).__mro__:
        if ERRORS_BY_NAME.get(kind.__name__) is kind:
            return kind.__name__
    return None
