"""The options of vLLM's requests, found in either field; requests of a made class, no vLLM needed."""

import logging
from types import SimpleNamespace

import pytest

from kv_pool import BlockHasher, BlockPool, InvalidArgumentError, KVCacheManager, Request
from kv_pool.integrations import vllm_warnings
from kv_pool.integrations.vllm.request_options.handler import (
    EngineOptions,
    note_arrival,
    read_max_pinned_blocks,
    report_end,
)
from kv_pool.integrations.vllm.request_options.options import (
    ABSENT,
    find_options,
    list_places,
    list_places_in_body,
)

HASHER = BlockHasher("sha256", "s", 4)
RETAIN = {"token_range_retention_configs": [{"token_end": 8, "priority": 80}]}
LIMIT = "KV_POOL_VLLM_MAX_PINNED_BLOCKS"


class EngineRequest(Request):
    """A request with what vLLM's class adds."""

    def __init__(self, name, extra_args):
        super().__init__(name, range(16), HASHER)
        self.sampling_params = SimpleNamespace(extra_args=extra_args)
        self.has_finished = True

    def is_finished(self):
        return self.has_finished


class Engine:
    def __init__(self, max_pinned_blocks=0):
        self.manager = KVCacheManager(BlockPool(9, True, 4))
        self.request_options = EngineOptions(self.manager, max_pinned_blocks, clock=lambda: 0.0)

    def run(self, request, *, by_connector):
        """Serve a request as vLLM does; return the connector's answer."""
        options = self.request_options
        if by_connector:
            note_arrival(self, request)
        options.note_request(request)
        prefix = self.manager.get_computed_blocks(request)
        self.manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
        request.num_computed_tokens = request.num_tokens
        answer = report_end(self, request) if by_connector else None
        if request.request_id in options.by_request:
            options.note_leaving(request)
        self.manager.free(request)
        options.note_left(request)
        assert not options.by_request
        return answer


@pytest.mark.parametrize(
    ("extra_args", "value"),
    [
        (None, ABSENT),
        ({}, ABSENT),
        ("kv_pool", ABSENT),
        ({"kv_pool": RETAIN}, RETAIN),
        ({"kv_pool": None}, None),
        ({"kv_transfer_params": {"kv_pool": RETAIN}}, RETAIN),
        ({"kv_transfer_params": {"kv_pool": None}, "other": 1}, None),
        ({"kv_transfer_params": None}, ABSENT),
        ({"kv_transfer_params": ["kv_pool"]}, ABSENT),
    ],
)
def test_options_are_found_in_either_field(extra_args, value):
    assert find_options(list_places(extra_args)) is value


def test_options_in_both_fields_are_refused():
    both = {"kv_pool": RETAIN, "kv_transfer_params": {"kv_pool": RETAIN}}
    with pytest.raises(InvalidArgumentError, match="in one of them"):
        find_options(list_places(both))
    with pytest.raises(InvalidArgumentError, match="in one of them"):
        find_options(
            list_places_in_body({"vllm_xargs": {"kv_pool": "{}"}, "kv_transfer_params": {"kv_pool": {}}})
        )
    answer = Engine().run(EngineRequest("r", both), by_connector=True)
    assert "in one of them" in answer["kv_pool"]["refused"]


@pytest.mark.parametrize("by_connector", [False, True])
def test_options_are_applied_with_and_without_connector(by_connector):
    engine = Engine()
    answer = engine.run(EngineRequest("r", {"kv_pool": RETAIN}), by_connector=by_connector)
    assert engine.manager.retention.num_retained == 2
    assert answer == ({"kv_pool": {"retained_tokens": 8}} if by_connector else None)


def test_request_without_options_creates_no_retention():
    engine = Engine()
    assert engine.run(EngineRequest("r", {"other": 1}), by_connector=True) is None
    embedding = EngineRequest("e", None)
    embedding.sampling_params = None
    assert engine.run(embedding, by_connector=True) is None
    assert engine.manager.retention is None


def test_connector_over_another_manager_refuses():
    manager = object()
    request = EngineRequest("r", {"kv_pool": RETAIN})
    note_arrival(manager, request)
    assert "KV_POOL_VLLM=manager" in report_end(manager, request)["kv_pool"]["refused"]
    both = EngineRequest("b", {"kv_pool": {}, "kv_transfer_params": {"kv_pool": {}}})
    assert "KV_POOL_VLLM=manager" in report_end(manager, both)["kv_pool"]["refused"]
    for plain in (EngineRequest("p", None), EngineRequest("q", {"other": 1})):
        assert report_end(manager, plain) is None


def test_preempted_request_keeps_its_options():
    engine = Engine()
    request = EngineRequest("r", {"kv_pool": RETAIN})
    request.has_finished = False
    options = engine.request_options
    options.note_request(request)
    engine.manager.allocate_slots(request, 16)
    request.num_computed_tokens = 16
    options.note_leaving(request)
    engine.manager.free(request)
    options.note_left(request)
    assert list(options.by_request) == ["r"]
    request.num_computed_tokens = 0
    request.has_finished = True
    assert engine.run(request, by_connector=True) == {"kv_pool": {"retained_tokens": 8}}


def test_refusals_are_logged_by_powers_of_two(caplog):
    engine = Engine()
    with caplog.at_level(logging.WARNING, "vllm.kv_pool"):
        for number in range(9):
            engine.run(EngineRequest(f"r{number}", {"kv_pool": 7}), by_connector=False)
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        f"kv_pool refuses the options of request {name} in extra_args['kv_pool']: "
        "Expected `object`, got `int`"
        for name in ("r0", "r1", "r3", "r7")
    ]


def test_unread_options_are_logged_once_for_each_place(caplog, monkeypatch):
    """`LLM(...)` has no API server that refuses them."""
    monkeypatch.setattr(vllm_warnings, "_records", None)
    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())
    manager = object()
    with caplog.at_level(logging.WARNING, "vllm.kv_pool"):
        for place in ({"kv_pool": RETAIN}, {"kv_pool": 7}, {"kv_transfer_params": {"kv_pool": 7}}, {"kv": 7}):
            note_arrival(manager, EngineRequest("r", place))
    assert [record.message.partition(", which")[0] for record in caplog.records] == [
        f"kv_pool ignores the options in {place}: this engine runs vLLM's KV cache manager"
        for place in ("extra_args['kv_pool']", "kv_transfer_params['kv_pool']")
    ]


def test_unexpected_error_is_logged_and_not_raised(caplog):
    engine = Engine()
    broken = EngineRequest("r", {"kv_pool": {"release": True}})
    del broken.block_hashes
    engine.request_options.note_request(broken)
    assert "could not apply the options of request r" in caplog.text
    assert engine.request_options.report_end(broken) is None


@pytest.mark.parametrize(
    ("setting", "limit", "message"),
    [
        (None, 0, ""),
        ("", 0, ""),
        ("3", 3, ""),
        ("5", 4, "a request of 16 tokens"),
        ("x", 0, "'x'"),
        ("-1", 0, "-1"),
    ],
)
def test_pin_limit_from_the_environment(monkeypatch, caplog, setting, limit, message):
    monkeypatch.delenv(LIMIT, raising=False)
    if setting is not None:
        monkeypatch.setenv(LIMIT, setting)
    manager = KVCacheManager(BlockPool(9, True, 4), max_model_len=16)
    assert read_max_pinned_blocks(manager) == limit
    assert message in caplog.text
    assert bool(message) == bool(caplog.records)
