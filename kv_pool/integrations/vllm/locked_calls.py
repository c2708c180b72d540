"""`locked`: makes a pool's methods take the lock that the control socket's answers take."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def locked(method: Method) -> Method:
    """Return a method that holds `self.control.lock` during each call."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.control.lock:
            return method(self, *args, **kwargs)

    return cast(Method, call)
