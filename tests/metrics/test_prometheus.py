"""Pools as metrics of Prometheus: the formats, the names, the page of all metrics, and a push."""

import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry, push_to_gateway
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kv_pool import BlockAllocationRequest, BlockPool, GPUKVPool, InvalidArgumentError
from kv_pool.events.event_publisher import NullEventPublisher
from kv_pool.metrics.metric_table import PREFIXES, list_metrics
from kv_pool.metrics.prometheus import PoolMetrics, encode_metrics
from kv_pool.migration.messages import MigrationPhase
from kv_pool.reports import PoolSources
from kv_pool.reports.histogram import AGE_BOUNDS_S, Histogram
from kv_pool.reports.tiers import TierList, TierStatistics

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Node:
    def count_migrations(self):
        return {"in doubt": 1, "reading": 2, "done": 7, "failed": 1}


@pytest.fixture
def sources():
    pool = GPUKVPool(100, 4)
    hashes = [bytes([one]) * 32 for one in range(5)]
    pool.allocate(BlockAllocationRequest(num_blocks=5, sequence_id=1))
    pool.cache_prefix(1, hashes)
    pool.free_sequence(1)
    pool.claim_prefix(2, [*hashes[:3], bytes([9]) * 32])
    ages = {}
    for name in ("hit GPU", "evict GPU", "life GPU", "evict CPU"):
        ages[name] = Histogram.make(AGE_BOUNDS_S)
        ages[name].note(3.0)
    tiers = TierList({"GPU": 3, "CPU": 2}, [TierStatistics("CPU", 30, 10, 64, 12, 5, 2, 1, 0)], 4)
    return PoolSources(
        pool=pool,
        tiers=lambda: tiers,
        publisher=NullEventPublisher(),
        node=Node(),
        ages=lambda: ages,
        refusals={"token": 1},
        name="a",
        model_name="m",
    )


def read(metrics, accept=""):
    content_type, body = encode_metrics(metrics, accept)
    parse = parse_openmetrics if "openmetrics" in content_type else parse_text
    families = list(parse(body.decode()))
    return families, {
        (
            sample.name,
            *(sample.labels[one] for one in sorted(sample.labels) if one not in COMMON),
        ): sample.value
        for family in families
        for sample in family.samples
    }


COMMON = ("engine", "model_name", "pool")


@pytest.mark.parametrize("accept", ["", "text/plain;version=1.0.0", OPENMETRICS])
def test_every_metric_of_the_table_is_exported_with_its_type_labels_and_help(sources, accept):
    families, values = read(PoolMetrics([sources], names=("vllm", "sglang")), accept)
    exported = {family.name: family for family in families}
    for metric in list_metrics(*PREFIXES):
        family = exported[
            metric.name if accept == OPENMETRICS else metric.exposed_name.removesuffix("_total")
        ]
        assert (family.type, family.documentation) == (metric.type, metric.help)
        for sample in family.samples:
            assert set(sample.labels) - {*COMMON, "le"} == set(metric.labels)
            assert sample.labels["model_name"] == "m"
            assert sample.labels["engine"] == "0"
    assert values["kv_pool_blocks", "cached"] == 2
    assert values["kv_pool_tier_errors_total", "CPU", "write"] == 1
    assert values["kv_pool_migrations", "in_doubt"] == 1
    assert values["kv_pool_ended_migrations_total", "done"] == 7
    assert values["kv_pool_block_age_seconds_count", "evict", "CPU"] == 1
    assert values["vllm:kv_cache_usage_perc",] == pytest.approx(0.03)
    assert (values["vllm:prefix_cache_queries_total",], values["vllm:prefix_cache_hits_total",]) == (16, 12)
    assert values["vllm:external_prefix_cache_hits_total",] == 8
    assert values["vllm:cache_config_info", "4", "101"] == 1
    assert values["sglang:cache_hit_rate",] == 0.75


def test_every_phase_of_a_migration_is_exported():
    read = [one.read for one in list_metrics("kv_pool") if one.name.endswith("migrations")]
    assert sorted(path for one in read for path in one.values()) == sorted(
        f"migrations.{phase.value}" for phase in MigrationPhase
    )


def test_a_bare_pool_exports_what_it_counts():
    _, values = read(PoolMetrics([PoolSources(pool=BlockPool(11, True, 4))]))
    assert values["kv_pool_blocks", "free"] == 10
    assert not any(
        name.startswith(("kv_pool_tier", "kv_pool_stream", "kv_pool_sequences")) for name, *_ in values
    )


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool on PATH")
def test_promtool_accepts_the_metrics(sources):
    def check(names):
        _, body = encode_metrics(PoolMetrics([sources], names=names))
        return subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True)

    done = check(())
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    done = check(("vllm", "sglang"))
    problems = (done.stdout + done.stderr).decode().splitlines()
    assert all("should not contain ':'" in line for line in problems), problems


def test_several_pools_share_a_registry_by_their_labels(sources):
    pools = [PoolSources(pool=GPUKVPool(size, 4), engine=str(size)) for size in (10, 20)]
    registry = CollectorRegistry()
    registry.register(PoolMetrics(pools))
    for size in (10, 20):
        labels = {"model_name": "", "engine": str(size), "pool": "", "state": "empty"}
        assert registry.get_sample_value("kv_pool_blocks", labels) == size
    with pytest.raises(InvalidArgumentError, match="the same model_name and engine"):
        PoolMetrics([pools[0], PoolSources(pool=pools[1].pool, engine="10")])
    with pytest.raises(InvalidArgumentError, match="did you mean 'vllm'"):
        PoolMetrics(pools, names="vLLM")


def test_metrics_are_pushed_to_a_gateway(sources):
    received = []

    class Gateway(BaseHTTPRequestHandler):
        def do_PUT(self):
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        registry = CollectorRegistry()
        registry.register(PoolMetrics([sources]))
        push_to_gateway(f"127.0.0.1:{server.server_port}", job="replay", registry=registry)
        thread.join()
    [(path, body)] = received
    assert path == "/metrics/job/replay"
    assert b"kv_pool_blocks{" in body


def test_meanings_and_advice_are_sentences():
    assert all(one.help.endswith(".") and one.advice.endswith(".") for one in list_metrics(*PREFIXES))


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("prometheus", "prometheus_client", "metrics"), ("otel", "opentelemetry.metrics", "otel")],
)
def test_a_missing_package_is_named_with_its_extra(module, package, extra):
    code = f"import sys; sys.modules[{package!r}] = None; import kv_pool.metrics.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"pip install '.[{extra}]'" in done.stderr.splitlines()[-1]
    assert "MissingDependencyError" in done.stderr
