"""`RayExecutor`: a `concurrent.futures.Executor` over the Ray cluster to which this process is connected."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class RayExecutor(Executor):
    """Runs each job as a Ray task, which takes one CPU.

    `ray.init` must have been called. Each task may run in another process; jobs are pickled by cloudpickle.
    """

    def __init__(self) -> None:
        import ray

        self._call = ray.remote(_call)

    def submit(
        self,
        fn: Callable[_Arguments, _Result],
        /,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> "Future[_Result]":
        """Start a task that calls `fn(*args, **kwargs)`."""
        future: Future[_Result] = self._call.remote(fn, args, kwargs).future()
        return future


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return function(*arguments, **options)
