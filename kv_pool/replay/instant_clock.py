"""The instant clock: each request begins and ends before the next one. The reference model."""

from collections.abc import Callable, Iterable

from kv_pool.manager.cached_prefix import CachedPrefix
from kv_pool.replay.prompt_steps import PromptSteps
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.report import ReplayReport
from kv_pool.replay.tally import Tally

_WHOLE_PROMPTS = PromptSteps()


def run_instantly(
    requests: Iterable[ReplayRequest],
    tally: Tally,
    on_request: Callable[[Tally], None],
    steps: PromptSteps = _WHOLE_PROMPTS,
) -> ReplayReport:
    """Look up, allocate step by step, free; one request at a time, output tokens left out.

    With full attention it reproduces the hit counts of any correct LRU simulator of full blocks, integer by
    integer.
    """
    num_blocks_in_use = 0
    for request in requests:
        tally.set_time(request.arrival_ms)
        if tally.count_request(request, request.num_tokens):
            prefix = tally.look_up(request)
            _compute(request, prefix, tally, steps)
            tally.count_hit(request, prefix)
            num_blocks_in_use += tally.num_blocks_in_use
            tally.end(request)
        on_request(tally)
    return tally.finish(num_blocks_in_use / max(1, tally.report.requests))


def _compute(request: ReplayRequest, prefix: CachedPrefix, tally: Tally, steps: PromptSteps) -> None:
    """The whole prompt behind its prefix. It has room: it is alone."""
    num_tokens = steps.count_next(prefix.num_tokens, request.num_tokens)
    has_room = tally.allocate(request, num_tokens, prefix)
    request.num_computed_tokens = prefix.num_tokens + num_tokens
    while has_room and request.num_computed_tokens < request.num_tokens:
        num_tokens = steps.count_next(request.num_computed_tokens, request.num_tokens)
        has_room = tally.allocate(request, num_tokens)
        request.num_computed_tokens += num_tokens
    assert has_room, f"request {request.request_id} does not fit into an empty pool"
