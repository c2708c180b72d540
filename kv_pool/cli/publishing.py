"""The publisher that `serve` and `replay` open when they are asked to send events."""

from collections.abc import Iterator
from contextlib import contextmanager

from kv_pool.errors import InvalidArgumentError
from kv_pool.events.config import PublisherConfig
from kv_pool.events.event_publisher import EventPublisher
from kv_pool.events.stream_state import StreamState


@contextmanager
def open_publisher(endpoint: str | None, replay_endpoint: str | None) -> Iterator[EventPublisher | None]:
    """A publisher of an exact stream with snapshots, closed at the end; None without an endpoint.

    Raises:
        InvalidArgumentError: what is no endpoint, or one for replay alone.
        EndpointError: one that cannot be bound.
        MissingDependencyError: pyzmq is not installed.
    """
    if endpoint is None:
        if replay_endpoint is not None:
            raise InvalidArgumentError("publish_replay is about missed events; give publish, too")
        yield None
        return
    from kv_pool.events.publisher import ZMQEventPublisher

    config = PublisherConfig(endpoint=endpoint, replay_endpoint=replay_endpoint)
    with ZMQEventPublisher(config, StreamState()) as publisher:
        yield publisher


def describe_publisher(publisher: EventPublisher) -> str:
    """The command that shows its events."""
    replay = "" if publisher.replay_endpoint is None else f" --replay {publisher.replay_endpoint}"
    return f"kv-pool events {publisher.endpoint}{replay}"
