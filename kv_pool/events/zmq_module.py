"""pyzmq, or an error that says how to get it. The only place that imports it."""

from kv_pool.errors import MissingDependencyError

try:
    import zmq
except ImportError as error:
    raise MissingDependencyError(
        "sending and receiving event streams needs pyzmq: pip install 'kv_pool[zmq]'"
    ) from error

__all__ = ["zmq"]
