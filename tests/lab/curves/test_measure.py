"""Tests of `measure_curves`: points, errors, the report's schema, CSV and picture."""

import json
import random
from dataclasses import replace

import pytest
from lab.curves.made_reuse import read_reuse
from lab.made_trace import make_random_records, record, write_trace
from lab.test_schemas import validator

from kv_pool import InvalidArgumentError
from kv_pool.lab.curves.curve_report import locate_knee
from kv_pool.lab.curves.lru_curve import LruCurve
from kv_pool.lab.curves.measure import measure_curves
from kv_pool.lab.curves.optimum_curve import OptimumCurve
from kv_pool.lab.report import write_json
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.simulator import run_replay
from kv_pool.lab.sweep import count_infinite_hits


@pytest.fixture
def settings(tmp_path):
    records = [*make_random_records(random.Random(5), 150, 8, partial_ids=True), "broken"]
    path = write_trace(tmp_path / "trace.jsonl", records)
    return ReplaySettings(str(path), 1, trace_block_size=8, skip_broken=True)


def test_points_equal_replays_and_the_optimum(settings):
    report = measure_curves(settings, [30, 6, 12, 6])
    assert [point.num_blocks for point in report.points] == [6, 12, 30]
    optimum = OptimumCurve(read_reuse(settings))
    for point in report.points:
        replayed = run_replay(replace(settings, num_blocks=point.num_blocks))
        assert (point.lru.block_hit_rate, point.lru.token_hit_rate) == (
            replayed.block_hit_rate,
            replayed.token_hit_rate,
        )
        assert point.refused_requests == replayed.refused_requests
        counts = (point.optimum.blocks_hit, point.optimum.tokens_hit)
        assert counts == optimum.count_hits(point.num_blocks)
    assert report.infinite_cache == count_infinite_hits(settings)


def test_default_capacities_reach_all_hits(settings):
    report = measure_curves(settings)
    reuse = read_reuse(settings)
    capacities = [point.num_blocks for point in report.points]
    assert capacities[0] == reuse.largest_request == report.largest_request
    assert capacities == sorted(set(capacities))
    assert report.points[0].refused_requests == 0
    assert report.points[-1].lru.tokens_hit == report.infinite_cache.tokens_hit
    least = LruCurve(reuse).find_least_full_capacity()
    assert capacities[-1] == least
    below = LruCurve(reuse).count_hits(least - 1)
    assert below[0] < report.infinite_cache.blocks_hit or least == reuse.largest_request


def test_counts_that_are_no_optimum_are_called_bounds(tmp_path):
    def measure(records, convention):
        path = write_trace(tmp_path / "trace.jsonl", records)
        report = measure_curves(ReplaySettings(str(path), 1, trace_block_size=8, convention=convention))
        return report.optimum_blocks, report.optimum_tokens

    assert measure([record(20, [1, 2, 3])], "full_blocks_cap") == ("optimal", "optimal")
    assert measure([record(20, [1, 2, 3])], "ids_as_blocks") == ("optimal", "bound")
    assert measure([record(16, [1, 2])] * 2, "full_blocks_cap") == ("bound", "bound")


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"clock": "trace"}, "a curve ignores clock: it is for one request at a time and full attention"),
        ({"groups": "full,mamba", "host_tier": 9}, "a curve ignores groups, host_tier: "),
        ({"convention": "papers"}, "unknown convention 'papers'"),
        ({"limit": 0}, "limit is 0"),
    ],
)
def test_settings_without_effect_are_refused(settings, setting, why):
    with pytest.raises(InvalidArgumentError, match=why):
        measure_curves(ReplaySettings(settings.trace, 1, **setting))


@pytest.mark.parametrize("capacities", [[], [0, 5], [-1]])
def test_invalid_capacities_are_refused(settings, capacities):
    with pytest.raises(InvalidArgumentError, match="needs at least one, each of 1 block or more"):
        measure_curves(settings, capacities)


def test_progress_is_reported(settings):
    told = []
    measure_curves(settings, [2, 9, 20], lambda doing, share: told.append((doing, share)))
    assert list(dict.fromkeys(doing for doing, share in told)) == ["reading", "LRU", "optimum"]
    assert all(0 <= share <= 1 for doing, share in told)
    for done in ("LRU", "optimum"):
        shares = [share for doing, share in told if doing == done]
        assert shares == sorted(shares), "it used to jump back"
    assert len({share for doing, share in told if doing == "LRU"}) > 2
    assert len({share for doing, share in told if doing == "optimum"}) > 4, "it does not move in a capacity"


def test_report_matches_its_schema(settings, tmp_path):
    write_json(measure_curves(settings), str(tmp_path / "curve.json"))
    found = json.loads((tmp_path / "curve.json").read_text())
    validator("curve").validate(found)
    assert found["broken_lines"] == 1
    assert not validator("curve").is_valid(found | {"more": 1})
    assert not validator("curve").is_valid(found | {"optimum_tokens": "best"})


def test_knee_is_farthest_above_the_straight_line():
    assert locate_knee([10, 100, 1000, 10_000], [0.0, 0.5, 0.55, 0.6]) == 100
    assert locate_knee([10, 100, 1000, 10_000], [0.0, 0.1, 0.2, 0.6]) is None
    assert locate_knee([10, 100], [0.0, 0.5]) is None
