"""The options of requests over a `KVCacheManager`: what stays cached, for how long, and what is refused.

At the end those of vLLM's requests, found in either field; requests of a made class, no vLLM needed.
"""

import logging
from types import SimpleNamespace

import pytest

from kv_pool import (
    BlockHasher,
    BlockPool,
    BlockRetention,
    FullAttentionSpec,
    InvalidArgumentError,
    InvalidTypeError,
    KVCacheManager,
    Request,
    SlidingWindowSpec,
)
from kv_pool.core import invariants
from kv_pool.integrations import vllm_warnings
from kv_pool.integrations.vllm.request_options.handler import (
    EngineOptions,
    RequestOptionsHandler,
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
from kv_pool.manager.retention.invariants import check_retention

HASHER = BlockHasher("sha256", "s", 4)
CHAT = range(1000, 1016)  # 4 blocks


class Engine:
    """A manager of 8 blocks with options, on a clock that stands still."""

    def __init__(
        self,
        num_blocks=8,
        *,
        max_pinned_blocks=4,
        groups=None,
        enable_caching=True,
        retention=None,
        policy=None,
    ):
        self.now = 100.0
        self.pool = BlockPool(num_blocks + 1, enable_caching, 4, policy=policy)
        if retention is not None:
            retention = BlockRetention(self.pool, lambda: self.now, max_pinned_blocks=retention)
        self.manager = KVCacheManager(self.pool, groups=groups, retention=retention)
        self.handler = RequestOptionsHandler(self.manager, lambda: self.now, max_pinned_blocks)
        self.num_flooded = 0

    def start(self, name, tokens, options=None, session_id=None):
        request = Request(name, tokens, HASHER, session_id=session_id)
        if options is not None:
            self.handler.receive(request, options)
        prefix = self.manager.get_computed_blocks(request)
        num_new = request.num_tokens - prefix.num_tokens
        assert self.manager.allocate_slots(request, num_new, prefix) is not None
        request.num_computed_tokens = request.num_tokens
        self.check()
        return request

    def end(self, request):
        report = self.handler.note_end(request)
        self.manager.free(request)
        self.handler.note_freed(request)
        self.check()
        return None if report is None else report.to_json()

    def run(self, name, tokens, options=None, session_id=None):
        return self.end(self.start(name, tokens, options, session_id))

    def flood(self, num_requests=20, num_tokens=16):
        """Run requests with other prompts, so that everything that nothing keeps is evicted."""
        for _ in range(num_requests):
            self.num_flooded += 1
            start = 100_000 + 1000 * self.num_flooded
            self.run(f"flood {self.num_flooded}", range(start, start + num_tokens))

    def count_hits(self, tokens):
        return self.manager.get_computed_blocks(Request("probe", tokens, HASHER), len(tokens)).num_tokens

    def check(self):
        invariants.check(self.pool)
        if self.manager.retention is not None:
            check_retention(self.manager.retention)


def retain(end, priority=80, duration_ms=None, **fields):
    one = {"token_start": 0, "token_end": end, **fields}
    if "pin" not in fields:
        one["priority"] = priority
    if duration_ms is not None:
        one["duration_ms"] = duration_ms
    return {"token_range_retention_configs": [one]}


@pytest.mark.parametrize(
    ("options", "report"),
    [
        (retain(8, duration_ms=5000), {"retained_tokens": 8, "expires_in_ms": 5000}),
        (retain(16), {"retained_tokens": 16}),
        (retain(8, duration_ms=5000, pin=True), {"retained_tokens": 8, "expires_in_ms": 5000}),
        (
            {"session": {"id": "user-17", "duration_ms": 60_000}},
            {"retained_tokens": 16, "expires_in_ms": 60_000},
        ),
        ({"session": {"duration_ms": 60_000}}, {"retained_tokens": 16, "expires_in_ms": 60_000}),
        ({"release": True}, {"changed_blocks": 4}),
        ({"end_session": "first"}, {"ended_session": True}),
        ({"end_session": "unknown"}, {"ended_session": False}),
    ],
)
def test_options_are_reported_with_what_they_keep(options, report):
    """How long blocks stay is compared with a model, see `test_handler_random`."""
    engine = Engine()
    engine.run("before", CHAT, {"session": {"id": "first", "duration_ms": 30_000}})
    assert engine.run("chat", CHAT, options, session_id="of the request") == report
    sessions = dict(engine.manager.retention.list_sessions())
    assert sessions.pop("first", 130.0) == 130.0
    session = options.get("session")
    assert sessions == ({} if session is None else {session.get("id", "of the request"): 160.0})
    engine.now += 60
    engine.flood()
    assert engine.count_hits(CHAT) == (16 if report == {"retained_tokens": 16} else 0)


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"retention": 2}, retain(16, duration_ms=1, pin=True), "this engine allows 2 pinned blocks"),
        ({"max_pinned_blocks": 0}, retain(4, duration_ms=1, pin=True), "allows 0 pinned blocks in total"),
        ({}, {**retain(20, duration_ms=1, pin=True), "release": True, "end_session": "s"}, "4 pinned blocks"),
        ({}, {**retain(2**31 - 1, duration_ms=1, pin=True), "release": True}, "4 pinned blocks"),
        ({"enable_caching": False}, retain(8), "prefix cache is off"),
        ({}, {"session": {"duration_ms": 60_000}}, "session has no id"),
        (
            {},
            {"token_range_retention_configs": [{"priority": 101}]},
            r"<= 100 - at `$.token_range_retention_configs[0].priority`",
        ),
    ],
)
def test_refused_options_change_nothing(settings, options, message):
    engine = Engine(**settings)
    before = engine.manager.retention
    report = engine.run("chat", CHAT, options)
    assert list(report) == ["refused"]
    assert message in report["refused"]
    assert engine.manager.get_num_free_blocks() == 8
    assert engine.handler.by_request == {}
    assert engine.manager.retention is before or engine.manager.retention.num_pins == 0


def test_second_call_for_a_request_does_nothing():
    engine = Engine()
    request = engine.start("chat", CHAT, retain(8))
    engine.handler.receive(request, retain(16))
    assert engine.end(request) == {"retained_tokens": 8}


def test_change_of_pins_over_the_limit_applies_no_part():
    engine = Engine(max_pinned_blocks=2)
    engine.run("chat", CHAT)
    pins = [{"token_start": n, "token_end": n + 8, "duration_ms": 9, "pin": True} for n in (0, 8)]
    report = engine.run("change", CHAT, {**retain(16), "change": pins})
    assert "4 blocks would be pinned" in report["refused"]
    engine.flood()
    assert engine.count_hits(CHAT) == 0


def preempt(engine, request):
    engine.handler.note_preempted(request)
    engine.manager.free(request)
    engine.handler.note_freed(request, will_return=True)
    request.num_computed_tokens = 0
    engine.check()


def resume(engine, request):
    prefix = engine.manager.get_computed_blocks(request)
    num_new = request.num_tokens - prefix.num_tokens
    assert engine.manager.allocate_slots(request, num_new, prefix) is not None
    request.num_computed_tokens = request.num_tokens
    engine.check()


def test_pins_that_no_longer_fit_after_a_preemption_are_refused():
    engine = Engine(max_pinned_blocks=4)
    request = Request("chat", CHAT, HASHER)
    engine.handler.receive(
        request, {**retain(16, duration_ms=5000, pin=True), "decode_retention_priority": 90}
    )
    engine.manager.allocate_slots(request, 16)
    request.num_computed_tokens = 10  # the step of the last tokens did not run
    preempt(engine, request)
    resume(engine, request)
    assert "blocks would be pinned" in engine.end(request)["refused"]
    assert engine.manager.retention.num_pins == 4


def test_groups_are_retained_together():
    groups = [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=8, sliding_window=8)]
    engine = Engine(12, groups=groups)
    engine.run("chat", CHAT, retain(16))
    engine.flood()
    assert engine.count_hits(CHAT) == 16


def test_another_retention_is_refused():
    engine = Engine(retention=0)
    with pytest.raises(InvalidArgumentError, match="already"):
        engine.manager.attach_retention(BlockRetention(BlockPool(4, True, 4), lambda: 0.0))
    with pytest.raises(InvalidArgumentError, match="another pool"):
        Engine().manager.attach_retention(engine.manager.retention)
    with pytest.raises(InvalidTypeError):
        engine.manager.attach_retention(None)


def test_wrong_arguments_of_the_handler():
    manager = Engine().manager
    with pytest.raises(InvalidTypeError):
        RequestOptionsHandler(None, lambda: 0.0)
    with pytest.raises(InvalidTypeError):
        RequestOptionsHandler(manager, None)
    with pytest.raises(InvalidArgumentError, match="0 or more"):
        RequestOptionsHandler(manager, lambda: 0.0, -1)
    with pytest.raises(InvalidTypeError):
        RequestOptionsHandler(manager, lambda: 0.0).receive(None, {})


def test_hints_reach_the_request_and_open_no_retention():
    engine = Engine()
    hints = {"ttl_s": 20, "session_id": "user-17"}
    request = engine.start("a", CHAT, {"hints": hints})
    assert request.kv_hints == hints
    assert engine.manager.retention is None
    assert engine.end(request) == {}
    refused = engine.start("b", CHAT, {"hints": {"ttl_s": 20}, "session": {"duration_ms": 1000}})
    assert refused.kv_hints is None
    assert "session has no id" in engine.end(refused)["refused"]


def test_options_keep_blocks_over_a_cache_policy():
    engine = Engine(policy="ttl")
    options = {**retain(16, 90), "hints": {"ttl_s": 20}}
    engine.run("a", CHAT, options)
    engine.flood()
    assert engine.count_hits(CHAT) == 16
    assert engine.pool.policy_host.failure is None


# ---- cost ----------------------------------------------------------------------------------------


class CountedHashes(list):
    """Block hashes that count how many of them are read."""

    num_read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


def nested_ranges(num_tokens, **options):
    """Return as many ranges as a list may have, each within the one before."""
    return [{"token_start": i, "token_end": num_tokens - i, **options} for i in range(64)]


RANGES = nested_ranges(400)
OUTLIVED = [
    {**one, "priority": 99 - number, "duration_ms": 1000 + number} for number, one in enumerate(RANGES)
]


@pytest.mark.parametrize(
    "options",
    [
        {"change": OUTLIVED, "demote": RANGES, "release": RANGES},
        {"change": OUTLIVED[::-1], "demote": True},
        {"change": nested_ranges(400, pin=True, duration_ms=1000)},
        {"release": RANGES},
    ],
    ids=["three fields", "reversed", "pins", "release"],
)
def test_options_read_each_block_of_a_prompt_once(options):
    """The scheduler's thread was busy for seconds with 192 legal ranges of a long prompt."""
    engine = Engine(100, max_pinned_blocks=100)
    engine.end(engine.start("first", range(400)))
    request = Request("second", range(400), HASHER)
    request.block_hashes = CountedHashes(request.block_hashes)
    engine.handler.receive(request, options)
    assert engine.handler.by_request["second"].report.to_json() == {"changed_blocks": 100}
    assert request.block_hashes.num_read == 100
    engine.check()


def test_pins_of_many_ranges_are_refused_before_listing_blocks():
    """64 ranges of 2**31 tokens in all, each below the limit."""
    engine = Engine(8, max_pinned_blocks=2**23)
    size = 2**25
    ranges = [
        {"token_start": i * size, "token_end": (i + 1) * size, "pin": True, "duration_ms": 1000}
        for i in range(63)
    ]
    request = Request("pins", CHAT, HASHER)
    engine.handler.receive(request, {"token_range_retention_configs": ranges})
    assert f"{63 * size // 4} blocks would be pinned" in engine.handler.by_request["pins"].report.refused
    assert engine.manager.retention.num_pins == 0


def test_overlapping_ranges_count_once_in_the_report():
    engine = Engine(100)
    ranges = [*nested_ranges(200, priority=90), {"token_start": 240, "token_end": 244, "priority": 50}]
    request = engine.start("a", range(400), {"token_range_retention_configs": ranges[1:]})
    assert engine.end(request) == {"retained_tokens": 204}


# ---- under vLLM's scheduler ---------------------------------------------------------------------

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


class ScheduledEngine:
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
    answer = ScheduledEngine().run(EngineRequest("r", both), by_connector=True)
    assert "in one of them" in answer["kv_pool"]["refused"]


@pytest.mark.parametrize("by_connector", [False, True])
def test_options_are_applied_with_and_without_connector(by_connector):
    engine = ScheduledEngine()
    answer = engine.run(EngineRequest("r", {"kv_pool": RETAIN}), by_connector=by_connector)
    assert engine.manager.retention.num_retained == 2
    assert answer == ({"kv_pool": {"retained_tokens": 8}} if by_connector else None)


def test_request_without_options_creates_no_retention():
    engine = ScheduledEngine()
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
    engine = ScheduledEngine()
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
    engine = ScheduledEngine()
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
    engine = ScheduledEngine()
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
