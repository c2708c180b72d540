"""The lines that vLLM's own request logger writes are read."""

import io
import logging

import pytest

from kv_pool.lab.formats.vllm_log import VLLMLogReader

pytestmark = pytest.mark.vllm

TEXT = "prompt_token_ids: [9], Generated response x details: output_token_ids: [1]\nRequest y details: "


@pytest.fixture
def vllm_log():
    """Return vLLM's request logger, and the text that it writes with vLLM's formatter."""
    from vllm import logger as vllm_logger
    from vllm.entrypoints.serve.utils import request_logger
    from vllm.logging_utils import NewLineFormatter

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    form = vllm_logger._FORMAT.replace("%(vllm_process_name)s", "APIServer").replace("%(fileinfo)s", "x.py")
    handler.setFormatter(NewLineFormatter(form, vllm_logger._DATE_FORMAT))
    logger = request_logger.logger
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    yield request_logger.RequestLogger(max_log_len=None), stream
    logger.removeHandler(handler)
    logger.setLevel(level)
    logger.propagate = propagate


def test_own_lines_of_vllm_are_read(vllm_log, tmp_path):
    from vllm import SamplingParams

    log, stream = vllm_log
    log.log_inputs("cmpl-1", TEXT, [1, 2, 3], None, SamplingParams(stop=[TEXT]), None)
    log.log_inputs("cmpl-2", None, [4], None, SamplingParams(), None)
    log.log_outputs("cmpl-2", TEXT, [5, 6], "stop")
    log.log_outputs("cmpl-1", "a", [7], None, is_streaming=True, delta=True)
    log.log_outputs("cmpl-1", "ab", [7, 8, 9], "stop", is_streaming=True)
    path = tmp_path / "vllm.log"
    path.write_text(stream.getvalue())
    first, second = VLLMLogReader(path)
    assert (first.token_ids, first.output_length) == ([1, 2, 3], 3)
    assert (second.token_ids, second.output_length) == ([4], 2)
    assert first.arrival_ms <= second.arrival_ms


def test_request_without_tokens_is_an_error(vllm_log, tmp_path):
    from vllm import SamplingParams

    from kv_pool import TraceError

    log, stream = vllm_log
    log.log_inputs("cmpl-1", "text", None, None, SamplingParams(), None)
    path = tmp_path / "vllm.log"
    path.write_text(stream.getvalue())
    with pytest.raises(TraceError, match=r"vllm\.log:\d+: the request has no prompt_token_ids"):
        list(VLLMLogReader(path))
