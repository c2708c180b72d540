"""The event publisher of `serve` and `replay`."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kv_pool.errors import InvalidArgumentError
from kv_pool.events.event_publisher import PublisherConfig
from kv_pool.events.stream_state import StreamState

if TYPE_CHECKING:
    from kv_pool.events.publisher import ZMQEventPublisher


@contextmanager
def open_publisher(
    endpoint: str | None, replay_endpoint: str | None, config_file: str | None = None
) -> "Iterator[ZMQEventPublisher | None]":
    """Yield a publisher of an exact stream with snapshots, or None without an endpoint and a file.

    Raises:
        InvalidArgumentError: as `read_publisher_config`, or a key file cannot be used.
        EndpointError: an endpoint cannot be bound.
        MissingDependencyError: pyzmq is not installed.
    """
    config = read_publisher_config(endpoint, replay_endpoint, config_file)
    if config is None:
        yield None
        return
    from kv_pool.events.publisher import ZMQEventPublisher

    with ZMQEventPublisher(config, StreamState()) as publisher:
        yield publisher


def read_publisher_config(
    endpoint: str | None, replay_endpoint: str | None, config_file: str | None
) -> PublisherConfig | None:
    """Return the table `[publisher]` of a TOML file; endpoints that are given override its own.

    Returns:
        None without an endpoint and a file.
    Raises:
        InvalidArgumentError: an endpoint is invalid, only the replay endpoint is given, or the file cannot
            be read or is invalid. The message names it.
    """
    if config_file is None:
        if endpoint is None:
            if replay_endpoint is not None:
                raise InvalidArgumentError("publish_replay is for missed events; set publish, too")
            return None
        return PublisherConfig.for_routers(endpoint=endpoint, replay_endpoint=replay_endpoint)
    config = PublisherConfig.from_toml(config_file)
    return replace(
        config,
        endpoint=config.endpoint if endpoint is None else endpoint,
        replay_endpoint=config.replay_endpoint if replay_endpoint is None else replay_endpoint,
    )


def describe_publisher(publisher: "ZMQEventPublisher") -> str:
    """Return the command that shows the events of a publisher."""
    config = publisher.config
    words = ["kv-pool", "events", str(publisher.endpoint)]
    if publisher.replay_endpoint is not None:
        words += ["--replay", publisher.replay_endpoint]
    if config.bind is False:
        words.append("--bind")
    if config.curve_secret_key_file is not None:
        words += ["--curve-server-key", config.curve_secret_key_file.removesuffix("_secret")]
    if config.curve_client_keys_dir is not None:
        words += ["--curve-secret-key", "YOURS.key_secret"]
    return shlex.join(words)
