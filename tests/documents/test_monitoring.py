"""The Grafana board, alert rules and configuration of examples/monitoring, on a run and a real Prometheus."""

import importlib.util
import json
import re
import shutil

import pytest
from cli.running_commands import running, wait_until
from documents.made_examples import EXAMPLES
from events.peers.dynamo_indexer import find_free_port
from lab.made_trace import record, write_trace
from metrics.running_prometheus import check, needs_prometheus, running_prometheus

MONITORING = EXAMPLES / "monitoring"


def load_script():
    spec = importlib.util.spec_from_file_location("make_board", MONITORING / "make_board.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_files_are_what_the_script_makes():
    for path, make in load_script().FILES.items():
        assert path.read_text() == make(), f"run {MONITORING / 'make_board.py'}"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool on PATH")
def test_promtool_accepts_rules_and_configuration():
    check("rules", MONITORING / "kv_pool_alerts.yml")
    check("config", MONITORING / "prometheus.yml")


def list_queries():
    """Return the queries of the board, by panel and legend."""
    panels = json.loads((MONITORING / "kv_pool_board.json").read_text())["panels"]
    targets = [(panel["title"], target) for panel in panels for target in panel.get("targets", ())]
    return {f"{title}: {target['legendFormat']}": target["expr"] for title, target in targets}


def list_queries_of_vllm():
    """Return what vLLM's own boards ask about the cache, without their labels of models and engines.

    These are `grafana.json` of its release 0.33 and `vllm_kv_cache.json` of its main branch.
    """

    def share(name, by=""):
        hits, queries = (
            f"sum{by} (rate(vllm:{name}_{one}_total[$__rate_interval]))" for one in ("hits", "queries")
        )
        return f"{hits} / ({queries} > 0)"

    engines = " by (instance, engine)"
    queries = [
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "max(vllm:kv_cache_usage_perc)",
        "avg(vllm:kv_cache_usage_perc)",
        f"max{engines} (vllm:kv_cache_usage_perc)",
        share("prefix_cache"),
        share("prefix_cache", engines),
        share("external_prefix_cache"),
        "sum(rate(vllm:num_preemptions_total[$__rate_interval]))",
        f"sum{engines} (rate(vllm:num_preemptions_total[$__rate_interval]))",
    ]
    for name in ("lifetime", "idle_before_evict", "reuse_gap"):
        rates = {
            part: f"rate(vllm:kv_block_{name}_seconds_{part}[$__rate_interval])"
            for part in ("bucket", "sum", "count")
        }
        queries += [f"histogram_quantile({at}, sum by (le) ({rates['bucket']}))" for at in (0.5, 0.95, 0.99)]
        queries.append(f"sum({rates['sum']}) / (sum({rates['count']}) > 0)")
    return {query: query for query in queries}


def choose_all(query):
    """Return a query of a board for all pools, over some scrapes."""
    return re.sub(r"\$(model_name|engine|pool)", ".*", query.replace("$__rate_interval", "10s"))


def make_chats(num_chats=20, num_turns=40):
    """Return the records of chats that go on every 1.5 s: each turn hits the blocks of the one before."""
    turns = [
        (1500 * turn + 70 * chat, [1000 * chat + block for block in range(4 * turn + 4)])
        for turn in range(num_turns)
        for chat in range(num_chats)
    ]
    return [record(8 * len(blocks), blocks, 20, timestamp) for timestamp, blocks in turns]


@needs_prometheus
@pytest.mark.slow
def test_every_panel_has_data_of_a_run(tmp_path):
    """A node with tiers and events is scraped each second; boards of vLLM read it, too."""
    port, *streams = (find_free_port() for _ in range(3))
    configuration = (MONITORING / "prometheus.yml").read_text()
    for given, used in (("scrape_interval: 5s", "scrape_interval: 1s"), (":9400", f":{port}")):
        assert configuration.count(given) == 1
        configuration = configuration.replace(given, used)
    shutil.copy(MONITORING / "kv_pool_alerts.yml", tmp_path)
    write_trace(tmp_path / "chats.jsonl", make_chats())
    options = "chats.jsonl --blocks 400 --block-size 8 --trace-block-size 8 --host-tier 200 --disk-tier cold "
    options += "--name a --port {} --publish tcp://127.0.0.1:{} --publish-replay tcp://127.0.0.1:{}"
    queries = {name: choose_all(one) for name, one in (list_queries() | list_queries_of_vllm()).items()}
    missing = set(queries)
    with (
        running(tmp_path, "serve", *options.format(port, *streams).split()) as process,
        running_prometheus(tmp_path, configuration) as prometheus,
    ):

        def has_all():
            missing.difference_update([one for one in missing if prometheus.query(queries[one])])
            return not missing

        try:
            wait_until(has_all, process)
        except AssertionError as error:
            pytest.fail(f"{error}; no data for {sorted(missing)}")
