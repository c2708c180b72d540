"""The instant clock: each request begins and ends before the next one. The reference model."""

from collections.abc import Callable, Iterable

from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.report import ReplayReport
from kv_pool.replay.tally import Tally


def run_instantly(
    requests: Iterable[ReplayRequest], tally: Tally, on_request: Callable[[Tally], None]
) -> ReplayReport:
    """Look up, allocate, free; one request at a time, output tokens left out.

    Reproduces the hit counts of any correct LRU simulator of full blocks, integer by integer.
    """
    block_size = tally.manager.block_size
    num_blocks_in_use = 0
    for request in requests:
        if tally.count_request(request, -(-request.num_tokens // block_size)):
            prefix = tally.look_up(request)
            tally.allocate(request, request.num_tokens - prefix.num_tokens, prefix)
            tally.count_hit(request, prefix)
            num_blocks_in_use += tally.num_blocks_in_use
            tally.free(request)
        on_request(tally)
    return tally.finish(num_blocks_in_use / max(1, tally.report.requests))
