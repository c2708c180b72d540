"""Import pyzmq, or raise an error that says how to install it. The only module that imports it."""

from kv_pool.errors import MissingDependencyError, describe_install

try:
    import zmq
except ImportError as error:
    raise MissingDependencyError(
        f"sending and receiving event streams needs pyzmq: {describe_install('zmq')}"
    ) from error

__all__ = ["zmq"]
