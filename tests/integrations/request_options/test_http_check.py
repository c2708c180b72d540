"""The check of `kv_pool` objects in front of an ASGI application; no vLLM needed."""

import asyncio
import json
import logging

import pytest

from kv_pool.integrations import vllm_warnings
from kv_pool.integrations.vllm.request_options.http_check import OptionsCheck, OptionsEndpoints, find_refusal

VALID = {"release": True}
INVALID = {"release": 1}


def make_body(options, *, field="kv_transfer_params", **more):
    return json.dumps({"model": "m", "prompt": "p", field: {"kv_pool": options}, **more}).encode()


async def echo(scope, receive, send):
    """Answer with the body of the request, and wait for the client to disconnect, as a stream does."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    last = await receive() if scope.get("streams") else {"type": "none"}
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body + last["type"].encode()})


def call(body, *, chunk=10_000, **scope):
    """Send a request through the check; return the status and the body of the answer."""
    chunks = [body[start : start + chunk] for start in range(0, len(body), chunk)] or [b""]
    messages = [
        {"type": "http.request", "body": part, "more_body": number < len(chunks)}
        for number, part in enumerate(chunks, 1)
    ]
    messages.append({"type": "http.disconnect"})
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    asyncio.run(OptionsCheck(echo)({"type": "http", "method": "POST", **scope}, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@pytest.fixture(autouse=True)
def level_manager(monkeypatch):
    monkeypatch.setenv("KV_POOL_VLLM", "manager")
    monkeypatch.setenv("VLLM_PLUGINS", "kv_pool")


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_valid_options_reach_the_application_unchanged(chunk):
    body = make_body(VALID)
    assert call(body, chunk=chunk) == (200, body + b"none")
    assert call(body, chunk=chunk, streams=True) == (200, body + b"http.disconnect")


@pytest.mark.parametrize("chunk", [1, 10_000])
def test_invalid_options_are_answered_in_the_form_of_vllm(chunk):
    status, body = call(make_body(INVALID), chunk=chunk)
    assert status == 400
    assert json.loads(body) == {
        "error": {
            "message": "kv_pool: Expected `bool | array`, got `int` - at `$.release`",
            "type": "BadRequestError",
            "param": "kv_pool",
            "code": 400,
        }
    }


def test_text_in_vllm_xargs_is_checked():
    assert find_refusal(make_body(json.dumps(VALID), field="vllm_xargs")) is None
    assert "release" in find_refusal(make_body(json.dumps(INVALID), field="vllm_xargs"))
    both = make_body(VALID, vllm_xargs={"kv_pool": json.dumps(VALID)})
    assert "send it in one of them" in find_refusal(both)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"kv_pool",
        b'{"kv_pool": ',
        b'["kv_pool"]',
        b'"kv_pool"',
        b'{"prompt": "what is kv_pool?"}',
        b'{"kv_pool": 1}',
        b'{"kv_transfer_params": "kv_pool"}',
        b'{"kv_transfer_params": {"other": "kv_pool"}, "vllm_xargs": ["kv_pool"]}',
        b"\xff kv_pool",
    ],
)
def test_other_bodies_are_not_refused(body):
    assert find_refusal(body) is None
    assert call(body) == (200, body + b"none")


def test_other_requests_are_passed_on():
    assert call(make_body(INVALID), method="PUT")[0] == 200


def test_refused_where_the_manager_is_vllms(monkeypatch):
    monkeypatch.setenv("KV_POOL_VLLM", "pool")
    assert "KV_POOL_VLLM=manager" in find_refusal(make_body(VALID))
    monkeypatch.delenv("KV_POOL_VLLM")
    assert "KV_POOL_VLLM=manager" in find_refusal(make_body(VALID))
    assert find_refusal(b"{}") is None
    monkeypatch.setenv("KV_POOL_VLLM", "manager")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "VLLM_PLUGINS=kv_pool" in find_refusal(make_body(VALID))


def test_check_without_the_plugin_warns(monkeypatch, caplog):
    """`--middleware` loads the check without the plugin, which vLLM does not call then."""
    monkeypatch.setattr(vllm_warnings, "_records", None)
    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with caplog.at_level(logging.WARNING, "vllm.kv_pool"):
        OptionsCheck(None)
    assert [record.message for record in caplog.records] == [
        "kv_pool is not used: KV_POOL_VLLM needs kv_pool's plugin, and VLLM_PLUGINS is 'other'; "
        "set VLLM_PLUGINS=other,kv_pool"
    ]


def test_disconnect_within_the_body_reaches_the_application():
    received = []

    async def application(scope, receive, send):
        received.extend([await receive(), await receive()])

    messages = [
        {"type": "http.request", "body": b"kv_", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive():
        return messages.pop(0)

    asyncio.run(OptionsCheck(application)({"type": "http", "method": "POST"}, receive, None))
    assert [message["type"] for message in received] == ["http.request", "http.disconnect"]


def test_plugin_installs_the_check():
    class Application:
        def __init__(self):
            self.middleware = []

        def add_middleware(self, middleware):
            self.middleware.append(middleware)

    app = Application()
    OptionsEndpoints().attach_router(app)
    assert app.middleware == [OptionsCheck]
    assert asyncio.run(OptionsEndpoints().init_state(None, None, None)) is None
