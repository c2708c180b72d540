"""`note_cached_tokens`: the cached tokens of a request as attributes of its OpenTelemetry span."""

import sys

INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"


def note_cached_tokens(num_prompt_tokens: int, num_cached_tokens: int) -> dict[str, int]:
    """Set the tokens of a prompt, and how many of them were cached, on the current span of OpenTelemetry.

        prefix = manager.get_computed_blocks(request)
        note_cached_tokens(request.num_prompt_tokens, prefix.num_tokens)

    Args:
        num_prompt_tokens: all tokens of the prompt, cached or not.
        num_cached_tokens: those whose K and V were not computed for this request, also if a lower tier had
            them.
    Returns:
        The attributes by the names of the GenAI semantic conventions, for a span that is not the current one:

        >>> from kv_pool.metrics.span_attributes import note_cached_tokens
        >>> note_cached_tokens(1000, 960)
        {'gen_ai.usage.input_tokens': 1000, 'gen_ai.usage.cache_read.input_tokens': 960}

    A program that has not imported OpenTelemetry has no span; then this only returns them. Call it when the
    request is first admitted: after a preemption, a request hits the blocks that it has computed itself.
    """
    attributes = {INPUT_TOKENS: num_prompt_tokens, CACHED_TOKENS: num_cached_tokens}
    trace = sys.modules.get("opentelemetry.trace")
    if trace is not None:
        trace.get_current_span().set_attributes(attributes)
    return attributes
