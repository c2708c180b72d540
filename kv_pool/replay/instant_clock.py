"""The instant clock: each request begins and ends before the next one. The reference model."""

from collections.abc import Callable, Iterable

from kv_pool.replay.prompt_steps import PromptSteps
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.report import ReplayReport
from kv_pool.replay.tally import FoundPrefix, Tally

_WHOLE_PROMPTS = PromptSteps()


def run_instantly(
    requests: Iterable[ReplayRequest],
    tally: Tally,
    on_request: Callable[[Tally], None],
    steps: PromptSteps = _WHOLE_PROMPTS,
) -> ReplayReport:
    """Look up, read back from tiers, allocate step by step, free; one request at a time, without output.

    With full attention it reproduces the hit counts of any correct LRU simulator of full blocks, integer by
    integer.
    """
    num_blocks_in_use = 0
    for request in requests:
        tally.set_time(request.arrival_ms)
        if tally.count_request(request, request.num_tokens):
            found = tally.look_up(request)
            _compute(request, found, tally, steps)
            tally.count_hit(request, found)
            num_blocks_in_use += tally.num_blocks_in_use
            tally.end(request)
        on_request(tally)
    return tally.finish(num_blocks_in_use / max(1, tally.report.requests))


def _compute(request: ReplayRequest, found: FoundPrefix, tally: Tally, steps: PromptSteps) -> None:
    """The whole prompt behind its prefix. It has room: it is alone."""
    num_tokens = steps.count_next(found.num_tokens, request.num_tokens)
    has_room = tally.begin(request, num_tokens, found)
    if tally.tiers is not None and tally.tiers.is_reading(request):
        tally.tiers.finish(request)
    else:
        request.num_computed_tokens = found.num_tokens + num_tokens
    while has_room and request.num_computed_tokens < request.num_tokens:
        num_tokens = steps.count_next(request.num_computed_tokens, request.num_tokens)
        has_room = tally.allocate(request, num_tokens)
        request.num_computed_tokens += num_tokens
    assert has_room, f"request {request.request_id} does not fit into an empty pool"
