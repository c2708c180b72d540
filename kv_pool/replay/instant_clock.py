"""The instant clock: each request ends before the next one starts. The reference model."""

from collections.abc import Callable, Iterable

from kv_pool.replay.driver import FoundPrefix, ReplayDriver
from kv_pool.replay.groups import PromptSteps
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.report import ReplayReport

_WHOLE_PROMPTS = PromptSteps()


def run_instantly(
    requests: Iterable[ReplayRequest],
    driver: ReplayDriver,
    on_request: Callable[[], None],
    steps: PromptSteps = _WHOLE_PROMPTS,
) -> ReplayReport:
    """Replay one request at a time, without output: look up, load from tiers, allocate, free.

    With full attention the hit counts equal those of any correct LRU simulator of full blocks exactly.
    """
    num_blocks_in_use = 0
    for request in requests:
        driver.set_time(request.arrival_ms)
        if driver.receive(request, request.num_tokens):
            found = driver.look_up(request)
            _compute(request, found, driver, steps)
            driver.note_hit(request, found)
            num_blocks_in_use += driver.num_blocks_in_use
            driver.end(request, request.arrival_ms)
        on_request()
    return driver.finish(num_blocks_in_use / max(1, driver.tally.report.requests))


def _compute(request: ReplayRequest, found: FoundPrefix, driver: ReplayDriver, steps: PromptSteps) -> None:
    """Compute the whole prompt after its cached prefix. It fits, because no other request runs."""
    num_tokens = steps.count_next(found.num_tokens, request.num_tokens, request.step_ends)
    has_room = driver.begin(request, num_tokens, found)
    if driver.is_reading(request):
        driver.finish_reading(request)
    else:
        request.num_computed_tokens = found.num_tokens + num_tokens
    while has_room and request.num_computed_tokens < request.num_tokens:
        num_tokens = steps.count_next(request.num_computed_tokens, request.num_tokens, request.step_ends)
        has_room = driver.allocate(request, num_tokens)
        request.num_computed_tokens += num_tokens
    assert has_room, f"request {request.request_id} does not fit into an empty pool"
