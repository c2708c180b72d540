"""Clients of vLLM's OpenAI-compatible server send options; a flood shows what they do (marker `vllm`)."""

import json

import pytest
from integrations.vllm_process import run_program

pytestmark = pytest.mark.vllm

CONNECTOR = {
    "kv_connector": "KVPoolConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "kv_pool.integrations.vllm.connector",
}
CHAT = range(1000, 1100)  # 6 full blocks of 16 tokens; the pool has 39 blocks


class Client:
    """A list of requests to send to a server, and the names of those whose answers matter."""

    def __init__(self):
        self.steps = []
        self.names = []
        self.num_floods = 0

    def complete(self, name, prompt=CHAT, options=None, *, as_text=False, **more):
        body = {"model": "fake", "prompt": list(prompt), "max_tokens": 2, **more}
        if as_text:
            body["vllm_xargs"] = {"kv_pool": json.dumps(options)}
        elif options is not None:
            body["kv_transfer_params"] = {"kv_pool": options}
        self.steps.append(["post", "/v1/completions", body])
        self.names.append(name)

    def flood(self):
        """Fill the pool more than once."""
        for _ in range(4):
            self.num_floods += 1
            start = 10_000 + 300 * self.num_floods
            self.complete("flood", range(start, start + 200))

    def wait(self, seconds):
        self.steps.append(["wait", seconds])

    def run(self, folder, *options, **environment):
        """Send the requests; return by name (cached tokens, `kv_pool` object), or (status, error message)."""
        (folder / "requests.json").write_text(json.dumps(self.steps))
        environment = {"KV_POOL_VLLM": "manager", **environment}
        told, self.log = run_program(
            "request_options/vllm_server.py", folder, "kv_pool", *options, **environment
        )
        answers = {}
        for name, (status, answer) in zip(self.names, told, strict=True):
            if status == 200:
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                report = (answer["kv_transfer_params"] or {}).get("kv_pool")
                answers[name] = (cached, report)
            else:
                answers[name] = (status, answer["error"]["message"])
        return answers


def retain(**fields):
    return {"token_range_retention_configs": [{"token_end": 64, **fields}]}


def test_server_with_connector_keeps_reports_and_refuses(tmp_path):
    client = Client()
    client.complete("plain")
    client.flood()
    client.complete("after a flood")
    client.complete("timed", CHAT, retain(priority=80, duration_ms=3000))
    client.flood()
    client.complete("before the deadline")
    client.flood()
    client.wait(3.1)
    client.flood()
    client.complete("after the deadline")
    client.complete("pin", CHAT, retain(pin=True, duration_ms=60_000))
    client.complete("too many pins", range(2000, 2200), {**retain(pin=True, duration_ms=9), "release": True})
    client.flood()
    client.complete("pinned", CHAT, {"release": True})
    client.complete("first turn", CHAT, {"session": {"duration_ms": 60_000}}, session_id="user-17")
    client.flood()
    client.complete("second turn", CHAT, session_id="user-17")
    client.complete("invalid", CHAT, {"change": [{"priority": 101}]})
    client.complete("demoted", CHAT, {"demote": True, "end_session": "user-17"})
    answers = client.run(
        tmp_path,
        "--kv-transfer-config",
        json.dumps(CONNECTOR),
        KV_POOL_VLLM_MAX_PINNED_BLOCKS="7",
    )
    refused = answers.pop("too many pins")[1]
    assert "4 blocks would be pinned, and 4 others are or may become pinned" in refused["refused"]
    assert set(refused) == {"refused"}
    answers.pop("flood")
    assert answers == {
        "plain": (0, None),
        "after a flood": (0, None),
        "timed": (96, {"retained_tokens": 64, "expires_in_ms": 3000}),
        "before the deadline": (64, None),
        "after the deadline": (0, None),
        "pin": (96, {"retained_tokens": 64, "expires_in_ms": 60_000}),
        "pinned": (64, {"changed_blocks": 4}),
        "first turn": (96, {"retained_tokens": 96, "expires_in_ms": 60_000}),
        "second turn": (96, None),
        "invalid": (400, "kv_pool: Expected `int` <= 100 - at `$.change[0].priority`"),
        "demoted": (96, {"changed_blocks": 6, "ended_session": False}),
    }
    assert "request cmpl-" in client.log
    assert "(1 requests with refused options so far)" in client.log


def test_server_without_connector_takes_text(tmp_path):
    client = Client()
    client.complete("kept", CHAT, retain(priority=80), as_text=True)
    client.complete("refused by the engine", CHAT, retain(pin=True, duration_ms=9), as_text=True)
    client.flood()
    client.complete("release", CHAT, {"release": True}, as_text=True)
    client.flood()
    client.complete("after the release", CHAT)
    client.complete("invalid", CHAT, {"release": 1}, as_text=True)
    answers = client.run(tmp_path)
    answers.pop("flood")
    assert answers == {
        "kept": (0, None),
        "refused by the engine": (96, None),
        "release": (64, None),
        "after the release": (0, None),
        "invalid": (400, "kv_pool: Expected `bool | array`, got `int` - at `$.release`"),
    }
    assert "this engine allows 0 pinned blocks in total" in client.log
