"""Make a Grafana board, alert rules and the page of all metrics from kv_pool's table of metrics.

    python examples/monitoring/make_board.py          # writes kv_pool_board.json and kv_pool_alerts.yml, too

The queries of panels and alerts are here. Their meaning, and what to do, are in the table of metrics.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from kv_pool.metrics.metric_table import PREFIXES, Metric, list_metrics

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "kv_pool/metrics/README.md"
MENUS = ("model_name", "engine", "pool")
"""The labels by which the board chooses pools."""

CHOSEN = ", ".join(f'{name}=~"${name}"' for name in MENUS)
NAME = re.compile(r"\bkv_pool_\w+")


def pick(name: str, *matchers: str) -> str:
    """Return a metric of the pools that are chosen on the board."""
    return f"{name}{{{', '.join([CHOSEN, *matchers])}}}"


def rate(name: str, *matchers: str) -> str:
    """Return the rate of a counter."""
    return f"rate({pick(name, *matchers)}[$__rate_interval])"


def total(query: str, by: str = "") -> str:
    """Return a sum, one for each value of the labels `by`."""
    return f"sum by ({by}) ({query})" if by else f"sum({query})"


def quantile(at: float, name: str, by: str, *matchers: str) -> str:
    """Return a quantile of a histogram over the last interval, one for each value of the labels `by`."""
    return f"histogram_quantile({at}, {total(rate(f'{name}_bucket', *matchers), f'le, {by}')})"


class Panel(NamedTuple):
    """A panel: its title, Grafana's unit of its values, and its queries by legend."""

    title: str
    unit: str
    queries: dict[str, str]
    is_stacked: bool = False


class Alert(NamedTuple):
    """An alert: its name, the condition, and how long it must hold."""

    name: str
    condition: str
    lasts: str
    severity: str = "warning"


ROWS = {
    "Prefix cache": [
        Panel(
            "Hit rate",
            "percentunit",
            {
                "engine {{engine}}": f"{total(rate('kv_pool_hit_tokens_total'), 'engine')} / "
                f"({total(rate('kv_pool_looked_up_tokens_total'), 'engine')} > 0)"
            },
        ),
        Panel(
            "Tokens looked up",
            "short",
            {
                "hit": total(rate("kv_pool_hit_tokens_total")),
                "missed": f"{total(rate('kv_pool_looked_up_tokens_total'))} - "
                f"{total(rate('kv_pool_hit_tokens_total'))}",
            },
            is_stacked=True,
        ),
        Panel(
            "Hits by medium",
            "short",
            {"{{medium}}": total(rate("kv_pool_hit_blocks_total"), "medium")},
            is_stacked=True,
        ),
    ],
    "Blocks": [
        Panel(
            "Pool use",
            "short",
            {"{{state}}": total(pick("kv_pool_blocks"), "state")},
            is_stacked=True,
        ),
        Panel(
            "Who holds blocks",
            "short",
            {
                "held: {{kind}}": total(pick("kv_pool_held_blocks"), "kind"),
                "pinned": total(pick("kv_pool_pinned_blocks")),
                "reserved": total(pick("kv_pool_reserved_blocks")),
            },
        ),
        Panel(
            "Sequences",
            "short",
            {
                "with blocks": total(pick("kv_pool_sequences")),
                "evicted per second": total(rate("kv_pool_evicted_sequences_total")),
            },
        ),
    ],
    "Evictions and ages": [
        Panel(
            "Evictions by cause",
            "short",
            {"{{cause}}": total(rate("kv_pool_evictions_total"), "cause")},
            is_stacked=True,
        ),
        *[
            Panel(
                title,
                "s",
                {
                    f"{{{{medium}}}}, {label}": quantile(
                        at, "kv_pool_block_age_seconds", "medium", f'event="{event}"'
                    )
                    for label, at in (("median", 0.5), ("95 %", 0.95))
                },
            )
            for title, event in (("Age at hit", "hit"), ("Age at eviction", "evict"))
        ],
    ],
    "Fragmentation": [
        Panel("Fragmentation", "percentunit", {"{{pool}}": pick("kv_pool_fragmentation_ratio")}),
        Panel(
            "Free runs",
            "short",
            {
                "of {{length}} blocks": total(pick("kv_pool_free_runs"), "length"),
                "the largest": f"max({pick('kv_pool_largest_free_run_blocks')})",
            },
        ),
        Panel(
            "Compaction",
            "short",
            {
                "moved blocks": total(rate("kv_pool_moved_blocks_total")),
                "exchanges of ids": total(rate("kv_pool_id_exchanges_total")),
            },
        ),
    ],
    "Lower tiers": [
        Panel(
            "Fill",
            "percentunit",
            {
                "{{medium}}": f"{total(pick('kv_pool_tier_blocks'), 'medium')} / "
                f"{total(pick('kv_pool_tier_capacity_blocks'), 'medium')}"
            },
        ),
        Panel(
            "Traffic in blocks",
            "short",
            {
                f"{{{{medium}}}} {verb}": total(rate(f"kv_pool_tier_{verb}_blocks_total"), "medium")
                for verb in ("stored", "read", "removed")
            },
        ),
        Panel(
            "Bytes, and what went wrong",
            "short",
            {
                "{{medium}} bytes": total(pick("kv_pool_tier_bytes"), "medium"),
                "{{medium}} {{operation}} errors": total(
                    rate("kv_pool_tier_errors_total"), "medium, operation"
                ),
                "not offloaded": total(rate("kv_pool_not_offloaded_blocks_total")),
            },
        ),
    ],
    "Event stream": [
        Panel("Batches", "short", {"{{outcome}}": total(rate("kv_pool_stream_batches_total"), "outcome")}),
        Panel(
            "Lag",
            "short",
            {
                "batches that wait": total(pick("kv_pool_stream_queued_batches")),
                "events in the pool": total(pick("kv_pool_queued_events")),
            },
        ),
        Panel(
            "Readers that missed something",
            "short",
            {
                "replays {{outcome}}": total(rate("kv_pool_stream_replays_total"), "outcome"),
                "snapshots": total(rate("kv_pool_stream_snapshots_total")),
                "slow readers": total(rate("kv_pool_stream_slow_readers_total")),
            },
        ),
    ],
    "Calls and migrations": [
        Panel(
            "Latency of calls",
            "s",
            {
                f"{{{{call}}}}, {label}": quantile(at, "kv_pool_call_seconds", "call")
                for label, at in (("median", 0.5), ("99 %", 0.99))
            },
        ),
        Panel(
            "Calls, and health",
            "short",
            {
                "{{call}}": total(rate("kv_pool_calls_total"), "call"),
                "interrupted": total(pick("kv_pool_interrupted_calls_total")),
                "invariants violated": total(pick("kv_pool_invariant_failures_total")),
            },
        ),
        Panel(
            "Migrations",
            "short",
            {
                "{{phase}} now": total(pick("kv_pool_migrations"), "phase"),
                "{{outcome}}": total(pick("kv_pool_ended_migrations_total"), "outcome"),
            },
        ),
    ],
}
"""The panels by the titles of their rows."""

OF_POOL = "instance, model_name, engine, pool"
ALERTS = [
    Alert("KVPoolCorrupted", "increase(kv_pool_invariant_failures_total[10m]) > 0", "0m", "critical"),
    Alert("KVPoolInterrupted", "kv_pool_interrupted == 1", "1m", "critical"),
    Alert(
        "KVPoolFull",
        f'sum by ({OF_POOL}) (kv_pool_blocks{{state="used"}}) / sum by ({OF_POOL}) (kv_pool_blocks) > 0.95',
        "10m",
    ),
    Alert("KVPoolEvictsSequences", "rate(kv_pool_evicted_sequences_total[5m]) > 0", "10m"),
    Alert(
        "KVPoolHitRateFell",
        "rate(kv_pool_hit_tokens_total[30m]) / rate(kv_pool_looked_up_tokens_total[30m]) < 0.5 * "
        "rate(kv_pool_hit_tokens_total[30m] offset 1d) / rate(kv_pool_looked_up_tokens_total[30m] offset 1d)",
        "30m",
    ),
    Alert(
        "KVPoolEvictsTooEarly",
        "histogram_quantile(0.5, "
        f'sum by (le, {OF_POOL}) (rate(kv_pool_block_age_seconds_bucket{{event="evict"}}[30m])))'
        " < histogram_quantile(0.5, "
        f'sum by (le, {OF_POOL}) (rate(kv_pool_block_age_seconds_bucket{{event="hit"}}[30m])))',
        "30m",
        "info",
    ),
    Alert("KVPoolFragmented", "kv_pool_fragmentation_ratio > 0.3", "15m"),
    Alert("KVPoolTierErrors", "increase(kv_pool_tier_errors_total[10m]) > 0", "0m"),
    Alert("KVPoolNotOffloaded", "rate(kv_pool_not_offloaded_blocks_total[10m]) > 0", "15m", "info"),
    Alert("KVPoolStreamLoses", 'increase(kv_pool_stream_batches_total{outcome!="sent"}[10m]) > 0', "0m"),
    Alert("KVPoolStreamLags", "kv_pool_stream_queued_batches > 100", "5m"),
    Alert("KVPoolLeaseStuck", 'kv_pool_leases{state="quarantined"} > 0', "5m"),
    Alert(
        "KVPoolMigrationsFail", 'increase(kv_pool_ended_migrations_total{outcome="failed"}[15m]) > 0', "0m"
    ),
]


def find_metrics(queries: str) -> list[Metric]:
    """Return the metrics that these queries read. KeyError for one that the table does not have."""
    table = {metric.exposed_name: metric for metric in list_metrics("kv_pool")}
    return [
        table[name] for name in dict.fromkeys(re.sub("_bucket$", "", one) for one in NAME.findall(queries))
    ]


def make_panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    """Return a panel of Grafana at a place of the board."""
    metrics = find_metrics(" ".join(panel.queries.values()))
    lines = [f"`{one.exposed_name}`: {one.help}\n\n{one.advice}" for one in metrics]
    targets = [
        {"refId": chr(ord("A") + at), "expr": query, "legendFormat": legend}
        for at, (legend, query) in enumerate(panel.queries.items())
    ]
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.is_stacked:
        custom = {"fillOpacity": 40, "showPoints": "never", "stacking": {"mode": "normal", "group": "A"}}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": "\n\n".join(lines),
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": x, "y": y, "w": 8, "h": 8},
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}},
    }


def make_menu(name: str) -> dict[str, Any]:
    """Return a menu of the values of a label; all of them by default, also the empty one."""
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": f"label_values(kv_pool_blocks, {name})",
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def make_board() -> str:
    """Return the board as JSON."""
    panels: list[dict[str, Any]] = []
    for at, (title, row) in enumerate(ROWS.items()):
        place = {"x": 0, "y": 9 * at, "w": 24, "h": 1}
        panels.append({"id": 100 + at, "type": "row", "title": title, "gridPos": place, "panels": []})
        panels += [make_panel(3 * at + x, panel, 8 * x, 9 * at + 1) for x, panel in enumerate(row)]
    board = {
        "uid": "kv-pool",
        "title": "kv_pool",
        "description": "Made by examples/monitoring/make_board.py of kv_pool.",
        "tags": ["kv_pool"],
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                *map(make_menu, MENUS),
            ]
        },
        "panels": panels,
    }
    return json.dumps(board, indent=1) + "\n"


def make_alerts() -> str:
    """Return the rules as YAML; JSON's strings are YAML's, too."""
    lines = ["# Made by make_board.py.", "groups:", "  - name: kv_pool", "    rules:"]
    for alert in ALERTS:
        metrics = find_metrics(alert.condition)
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.condition)}",
            f"        for: {alert.lasts}",
            f"        labels: {{severity: {alert.severity}}}",
            "        annotations:",
            f"          summary: {json.dumps(' '.join(one.help for one in metrics))}",
            f"          runbook: {json.dumps(' '.join(one.advice for one in metrics))}",
        ]
    return "\n".join(lines) + "\n"


def make_page() -> str:
    """Return the page with the tables of all metrics, one for each set, after its mark."""
    before, mark, _ = PAGE.read_text().partition("<!-- made from metrics.toml -->\n")
    lines = [before + mark]
    for name in PREFIXES:
        lines += [
            f"### {name}",
            "",
            "| metric | type | labels | meaning | when it looks bad |",
            "|---|---|---|---|---|",
        ]
        for one in list_metrics(name):
            labels = ", ".join(one.labels)
            lines.append(f"| `{one.exposed_name}` | {one.type} | {labels} | {one.help} | {one.advice} |")
        lines.append("")
    return "\n".join(lines)


FILES = {HERE / "kv_pool_board.json": make_board, HERE / "kv_pool_alerts.yml": make_alerts, PAGE: make_page}


def main() -> None:
    """Write the files."""
    for path, make in FILES.items():
        path.write_text(make())


if __name__ == "__main__":
    main()
