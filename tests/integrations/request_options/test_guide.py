"""The JSON of the guide is valid, and the refusal that it shows is the one that is sent."""

import json
import re
from pathlib import Path

import pytest

import kv_pool
from kv_pool.integrations.vllm.request_options.handler import RequestReport
from kv_pool.integrations.vllm.request_options.http_check import find_refusal
from kv_pool.integrations.vllm.request_options.options import (
    ABSENT,
    RequestOptions,
    find_options,
    list_places_in_body,
    read_options,
)

GUIDE = Path(kv_pool.__file__).parent / "integrations/vllm/request_options/README.md"
TEXT = GUIDE.read_text()
BODIES = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL) + re.findall(r"-d '(\{.*?\})'", TEXT, re.DOTALL)


@pytest.mark.parametrize("body", BODIES)
def test_json_of_the_guide_is_valid(body, monkeypatch):
    monkeypatch.setenv("KV_POOL_VLLM", "manager")
    monkeypatch.setenv("VLLM_PLUGINS", "kv_pool")
    value = find_options(list_places_in_body(json.loads(body)))
    assert value is not ABSENT
    assert read_options(value) != RequestOptions()
    assert find_refusal(body.encode()) is None


def test_guide_shows_every_field():
    sent = [read_options(find_options(list_places_in_body(json.loads(body)))) for body in BODIES]
    for field in RequestOptions.__struct_fields__:
        assert any(getattr(options, field) for options in sent), field
    assert all(f"| `{field}` |" in TEXT for field in RequestReport.__struct_fields__)


def test_refusal_of_the_guide():
    body = b'{"kv_transfer_params": {"kv_pool": {"change": [{"priority": 101}]}}}'
    assert f'"message": "{find_refusal(body)}"' in TEXT
