"""The span of a request says how many tokens of its prompt were cached."""

import subprocess
import sys

import pytest
from manager.table_drawing import make_request

from kv_pool import BlockPool, KVCacheManager
from kv_pool.metrics.span_attributes import note_cached_tokens

sdk = pytest.importorskip("opentelemetry.sdk.trace")


def test_spans_of_requests_have_the_names_of_the_conventions():
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as names

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("engine")
    manager = KVCacheManager(BlockPool(20, True, 4))
    for name in "ab":
        request = make_request(name, range(10))
        with tracer.start_as_current_span(name):
            prefix = manager.get_computed_blocks(request)
            returned = note_cached_tokens(request.num_prompt_tokens, prefix.num_tokens)
        assert manager.allocate_slots(request, 10 - prefix.num_tokens, prefix) is not None
        request.num_computed_tokens = 10
    first, second = (dict(span.attributes) for span in exporter.get_finished_spans())
    assert first == {names.GEN_AI_USAGE_INPUT_TOKENS: 10, names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 0}
    assert second == returned == {**first, names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 8}


def test_without_a_span_the_attributes_are_returned_and_nothing_is_imported():
    code = "import sys; from kv_pool.metrics.span_attributes import note_cached_tokens\n"
    code += "print(note_cached_tokens(3, 2), 'opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout == f"{note_cached_tokens(3, 2)} False\n"
