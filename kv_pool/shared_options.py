"""Options of commands of several rooms: the trace, its unit of time and its blocks, and where events go."""

from kv_pool.option import Option

BUNDLED_TRACES = {"mooncake_conversation": "mooncake_conversation.jsonl.gz"}
"""Traces that ship with the package: name to file."""

MS_PER_UNIT = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1000.0}
"""The units of timestamps, each with its milliseconds."""

TIME_UNIT = Option(
    f"Unit of the trace's timestamps: {', '.join(MS_PER_UNIT)}.",
    flags=("--time-unit", "--timestamp-unit"),
    known=lambda: MS_PER_UNIT,
)
TRACE_BLOCK_SIZE = Option("Tokens per hash id. Default: inferred from the trace.", min=1)

EVENTS_PANEL = "Events"

PUBLISH = Option(
    "Publish the pool's events at this endpoint, such as tcp://127.0.0.1:5557; port 0 picks a free one. "
    "kv-pool events shows them. Token ids are the trace's. If it has hash ids instead, each token of a "
    "block has the block's hash id as its token id, and generated tokens have 0.",
    metavar="ENDPOINT",
    panel=EVENTS_PANEL,
)
PUBLISH_REPLAY = Option(
    "Endpoint where subscribers request missed events, such as tcp://127.0.0.1:5657.",
    metavar="ENDPOINT",
    panel=EVENTS_PANEL,
)
PUBLISH_CONFIG = Option(
    "TOML file whose table [publisher] sets topic, heartbeat_s, hwm, CURVE keys or other fields of "
    "PublisherConfig. The two options above override its endpoints.",
    metavar="FILE",
    panel=EVENTS_PANEL,
)
