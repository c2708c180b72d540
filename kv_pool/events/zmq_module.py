"""Import pyzmq, or raise an error that says how to install it."""

from kv_pool.errors import MissingDependencyError, describe_install

try:
    import zmq
    import zmq.utils.monitor
    import zmq.utils.z85
except ImportError as error:
    raise MissingDependencyError(
        f"an event stream, or a node that other processes reach, needs pyzmq: {describe_install('zmq')}"
    ) from error

__all__ = ["zmq"]
