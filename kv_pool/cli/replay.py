"""`kv-pool replay`: replay a trace through a prefix cache of a given size."""

from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Annotated

import typer

from kv_pool.cli import options
from kv_pool.cli.console import show_progress
from kv_pool.cli.outputs import Outputs
from kv_pool.cli.publishing import describe_publisher, open_publisher
from kv_pool.cli.setting_options import takes
from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.event_feed import EVENTS_PANEL, EventFeed
from kv_pool.replay.pictures.hit_rates import draw_breakdowns
from kv_pool.replay.replay_words import report_replay
from kv_pool.replay.request_outcomes import parse_breakdowns, write_outcomes
from kv_pool.replay.settings import ReplaySettings
from kv_pool.replay.simulator import run_replay

_ORDER = """
trace blocks memory model num_layers num_kv_heads head_size dtype_bytes block_size policy convention clock
prefill_rate decode_rate max_running speedup groups states chunk_tokens watermark keep_sessions keep_prefix
host_blocks preempt copy_rate host_tier disk_tier tier_write disk_rate limit trace_block_size
timestamp_unit skip_broken seed runs by png publish publish_replay publish_config pace json requests
"""


@takes(ReplaySettings, _ORDER, num_blocks=0)
def replay(
    settings: ReplaySettings,
    capacity: options.CapacityOptions,
    outputs: Outputs,
    publish: options.Publish = None,
    publish_replay: options.PublishReplay = None,
    publish_config: options.PublishConfig = None,
    pace: Annotated[
        float | None,
        typer.Option(
            metavar="REQUESTS_PER_S",
            help="With --publish: at most this many requests a second. Without it, an hour's trace takes "
            "seconds: start kv-pool events first.",
            rich_help_panel=EVENTS_PANEL,
        ),
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write one line of JSON per request to this file: hits, blocks, wait, outcome.",
        ),
    ] = None,
) -> None:
    """Replay a trace through the block pool and show the hit rates of the prefix cache."""
    settings, capacities = capacity.find(settings)
    if len(capacities) > 1:
        raise InvalidArgumentError(f"a replay has one capacity, not {len(capacities)}; use kv-pool sweep")
    settings.check()
    if settings.preemption == "swap" and not settings.host_blocks:
        raise InvalidArgumentError(
            "--preempt swap has no effect without --host-blocks: pass both, or neither"
        )
    if outputs.png is not None and not parse_breakdowns(settings.by or ""):
        raise InvalidArgumentError("--png draws what --by lists; pass --by, too")
    outputs.check()
    if pace is not None and publish is None and publish_config is None:
        raise InvalidArgumentError("--pace is for events; pass --publish, too")
    # This block includes the output, so that the result is printed before the error of a truncated file.
    with nullcontext() if requests is None else write_outcomes(requests) as on_outcome:
        with ExitStack() as stack:
            publisher = stack.enter_context(open_publisher(publish, publish_replay, publish_config))
            feed = None
            if publisher is not None:
                feed = EventFeed(publisher, pace)
                print(f"in a second terminal: {describe_publisher(publisher)}", flush=True)
            notify = stack.enter_context(show_progress("replaying"))
            report = run_replay(settings, notify, feed, on_outcome)
        outputs.write(report_replay(report), partial(draw_breakdowns, report))
