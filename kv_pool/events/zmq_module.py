"""Import pyzmq, or raise an error that says how to install it."""

from kv_pool.errors import MissingDependencyError, describe_install

try:
    import zmq
except ImportError as error:
    raise MissingDependencyError(
        f"event streams, and nodes in other processes, need pyzmq: {describe_install('zmq')}"
    ) from error

__all__ = ["zmq"]
