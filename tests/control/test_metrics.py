"""`GET /metrics` of a control server."""

import json
import time
import urllib.error
import urllib.request

import pytest

from kv_pool import BlockAllocationRequest, GPUKVPool
from kv_pool.control import ControlServer, NetworkPort


@pytest.fixture
def url(tmp_path):
    pool = GPUKVPool(20, 4)
    pool.allocate(BlockAllocationRequest(num_blocks=5, sequence_id=1))
    pool.cache_prefix(1, [bytes([one]) * 32 for one in range(5)])
    with ControlServer(pool, tmp_path / "a.sock", port=NetworkPort()) as server:
        yield f"{server.url}metrics", pool


def get(url, accept="text/plain"):
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers={"Accept": accept}), timeout=30
        ) as answer:
            return answer.status, answer.headers["content-type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["content-type"], error.read().decode()


def test_refusals_are_counted_by_reason(url):
    url, _ = url
    assert get(url.replace("metrics", "v1/layout"))[0] == 403
    assert (
        'kv_pool_refused_requests_total{engine="0",model_name="",pool="",reason="token"} 1.0' in get(url)[2]
    )


def test_a_scrape_gets_the_format_and_the_names_that_it_asks_for(url):
    url, _ = url
    status, content_type, body = get(url)
    assert (status, content_type.split(";")[0]) == (200, "text/plain")
    assert 'kv_pool_blocks{engine="0",model_name="",pool="",state="used"} 5.0\n' in body
    assert "vllm:kv_cache_usage_perc{" in body
    _, content_type, body = get(url, "application/openmetrics-text; version=1.0.0, text/plain;q=0.5")
    assert content_type.split(";")[0] == "application/openmetrics-text"
    assert body.endswith("# EOF\n")
    assert "vllm:kv_cache_usage_perc{" in body
    _, _, body = get(url + "?names=sglang")
    assert "sglang:token_usage{" in body
    assert "vllm:" not in body
    status, content_type, body = get(url + "?names=nonsense")
    assert (status, content_type) == (400, "application/json")
    assert json.loads(body)["error"] == "InvalidArgumentError"


def test_a_server_knows_the_ages_of_blocks(url):
    url, pool = url
    deadline, number, body = time.monotonic() + 20, 1, ""
    while (
        'kv_pool_block_age_seconds_count{engine="0",event="evict"' not in body and time.monotonic() < deadline
    ):
        time.sleep(0.4)
        pool.free_sequence(number)
        number += 1
        pool.allocate(BlockAllocationRequest(num_blocks=20, sequence_id=number))
        pool.cache_prefix(number, [bytes([number, one]) * 16 for one in range(20)])
        _, _, body = get(url)
    assert "vllm:kv_block_idle_before_evict_seconds_count{" in body
