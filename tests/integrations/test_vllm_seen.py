"""A vLLM engine started with two lines more is seen everywhere, and answers the same (marker `engine`)."""

import json
import random
import shutil
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest
from events.peers.dynamo_indexer import find_free_port
from integrations.running_vllm import fetch, running_vllm
from metrics.running_prometheus import running_prometheus
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

VOCABULARY = range(3, 500)
PIN = {"token_range_retention_configs": [{"token_end": 64, "pin": True, "duration_ms": 600_000}]}
SCRAPES = """
global: {scrape_interval: 1s}
scrape_configs:
  - {job_name: vllm, static_configs: [{targets: [TARGET]}]}
"""


def ask(server, **options):
    """Return the answers to two prompts with one beginning, others that use all blocks, and the first again.

    Args:
        options: of the second request.
    """
    choose = random.Random(0)
    beginning = choose.choices(VOCABULARY, k=128)
    first, second = ([*beginning, *choose.choices(VOCABULARY, k=20)] for _ in range(2))
    answers = [server.complete(first), server.complete(second, **options)]
    answers += [server.complete(choose.choices(VOCABULARY, k=300)) for _ in range(8)]
    return [*answers, server.complete(first)]


def read_metrics(url):
    """Return the samples of a page of metrics that are labelled as the engine's, by name and own labels."""
    found = {}
    for family in text_string_to_metric_families(fetch(f"{url}/metrics")):
        for name, labels, value, *_ in family.samples:
            own = {key: text for key, text in labels.items() if key not in ("model_name", "engine", "pool")}
            if (labels.get("model_name"), labels.get("engine")) == ("tiny", "0"):
                found[name, *own.values()] = value
    return found


def run_top(*options):
    """Return what `kv-pool top --once --json` prints."""
    command = [sys.executable, "-P", "-m", "kv_pool", "top", "--once", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def read_first_event(url):
    """Return the data of the first event of the stream that the page reads."""
    with urllib.request.urlopen(f"{url}/v1/watch", timeout=60) as stream:
        return json.loads(next(line for line in stream if line.startswith(b"data: ")).removeprefix(b"data: "))


@contextmanager
def seen_vllm(folder, *options, **environment):
    """Run a server with the two lines, and the address of its engine's port; its end leaves nothing."""
    port = find_free_port()
    two_lines = {"VLLM_PLUGINS": "kv_pool", "KV_POOL_VLLM_CONTROL_PORT": str(port)}
    with running_vllm(folder, *options, **two_lines, **environment) as server:
        yield server, f"http://127.0.0.1:{port}"
        server.terminate()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port))
        assert [path for path in server.runtime.rglob("*") if not path.is_dir()] == []


def check_seen(server, url, pinned_blocks, tiers):
    """Check that each place shows the hits that vLLM counts, the misses, the pins and the tiers."""
    (path,) = server.runtime.rglob("*.sock")
    beside, own = read_metrics(server.url), read_metrics(url)
    num_hits = beside["vllm:prefix_cache_hits_total",]
    assert num_hits > 0
    shown = run_top("--socket", str(path)), run_top("--url", f"{server.url}/metrics")
    reading = read_first_event(url)["reading"]
    for metrics in (beside, own):
        assert metrics["kv_pool_hit_tokens_total",] == num_hits
        assert metrics["kv_pool_looked_up_tokens_total",] == reading["looked_up_tokens"] > num_hits
        assert metrics["kv_pool_pinned_blocks",] == pinned_blocks
        found = {name[1]: value for name, value in metrics.items() if name[0] == "kv_pool_tier_blocks"}
        assert found.keys() == tiers
        assert all(found.values())
    assert own["vllm:prefix_cache_hits_total",] == num_hits
    assert (reading["model_name"], reading["hit_tokens"]) == ("tiny", num_hits)
    assert (reading["pinned_blocks"], {tier["medium"] for tier in reading["tiers"]}) == (pinned_blocks, tiers)
    for one in shown:
        assert one["hit_rate"] == num_hits / reading["looked_up_tokens"]
        assert {bar["name"] for bar in one["bars"]} == {"GPU", *tiers}
        assert pinned_blocks in (one["levels"].get("pinned_blocks"), one["levels"].get("pinned blocks"))
    assert fetch(f"{url}/").startswith("<!doctype html>")


def test_two_lines(tmp_path):
    """The engine on vLLM's own classes, then with the two lines, then also with pins and tiers."""
    with running_vllm(tmp_path / "theirs", VLLM_PLUGINS="") as server:
        theirs = ask(server)
    with seen_vllm(tmp_path / "ours") as (server, url):
        assert ask(server) == theirs
        check_seen(server, url, 0, set())
    tiers = {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kv_pool.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "host_bytes": "512KiB",
            "disk_bytes": "16MiB",
            "disk_folder": str(tmp_path / "disk"),
        },
    }
    manager = {"KV_POOL_VLLM": "manager", "KV_POOL_VLLM_MAX_PINNED_BLOCKS": "8"}
    options = "--kv-transfer-config", json.dumps(tiers)
    with seen_vllm(tmp_path / "more", *options, **manager) as (server, url):
        answers = ask(server, kv_transfer_params={"kv_pool": PIN})
        assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in theirs]
        assert answers[-1][1] == 128  # two blocks are pinned, and two are on disk
        check_seen(server, url, 2, {"CPU", "STORAGE"})
        if shutil.which("prometheus"):
            target = json.dumps(server.url.removeprefix("http://"))
            with running_prometheus(tmp_path, SCRAPES.replace("TARGET", target)) as prometheus:
                (rate,) = prometheus.wait_for(
                    "kv_pool_hit_tokens_total / kv_pool_looked_up_tokens_total"
                ).values()
                assert rate == pytest.approx(run_top("--url", f"{url}/metrics")["hit_rate"])
                assert len(prometheus.query("kv_pool_tier_blocks")) == 2
