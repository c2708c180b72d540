"""Tests of `measure_curves`: points, errors, the report's schema, CSV and picture."""

import csv
import json
import random
from dataclasses import replace

import pytest
from replay.curves.made_reuse import make_repeating_records, read_reuse
from replay.made_trace import make_random_records, record, write_trace
from replay.test_schemas import validator

from kv_pool import InvalidArgumentError, TraceError
from kv_pool.replay.curves import curve_report
from kv_pool.replay.curves.curve_report import locate_knee, write_csv
from kv_pool.replay.curves.lru_curve import LruCurve
from kv_pool.replay.curves.measure import measure_curves
from kv_pool.replay.curves.optimum_curve import OptimumCurve
from kv_pool.replay.pictures.hit_rates import draw_curves
from kv_pool.replay.report import InfiniteCache, Provenance, write_json
from kv_pool.replay.settings import ReplaySettings
from kv_pool.replay.simulator import run_replay
from kv_pool.replay.sweep import count_infinite_hits


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


def test_refused_requests_are_counted(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [record(24, [1, 2, 3]), record(16, [1, 2])] * 2)
    report = measure_curves(ReplaySettings(str(path), 1, trace_block_size=8), [1, 2, 3])
    assert [point.refused_requests for point in report.points] == [4, 2, 0]
    assert [point.lru.blocks_hit for point in report.points] == [0, 1, 4]
    assert report.blocks_looked_up == 10


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
    measure_curves(settings, [9, 20], lambda doing, share: told.append((doing, share)))
    assert list(dict.fromkeys(doing for doing, share in told)) == ["reading", "LRU", "optimum"]
    assert all(0 <= share <= 1 for doing, share in told)


def test_report_matches_its_schema(settings, tmp_path):
    write_json(measure_curves(settings), str(tmp_path / "curve.json"))
    found = json.loads((tmp_path / "curve.json").read_text())
    validator("curve").validate(found)
    assert found["broken_lines"] == 1
    assert not validator("curve").is_valid(found | {"more": 1})
    assert not validator("curve").is_valid(found | {"optimum_tokens": "best"})


def test_schema_describes_every_field():
    structs = {
        "curve_report": curve_report.CurveReport,
        "curve_point": curve_report.CurvePoint,
        "curve_counts": curve_report.CurveCounts,
        "curve_sample": curve_report.CurveSample,
        "infinite_cache": InfiniteCache,
        "provenance": Provenance,
    }
    parts = validator("curve").schema["$defs"]
    assert set(parts) == set(structs)
    for name, struct in structs.items():
        assert list(parts[name]["properties"]) == parts[name]["required"] == list(struct.__struct_fields__)
        assert all(field.get("description") for field in parts[name]["properties"].values())


def test_csv_has_a_row_per_capacity(settings, tmp_path):
    report = measure_curves(settings, [9, 20])
    write_csv(report, str(tmp_path / "curve.csv"))
    with open(tmp_path / "curve.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["num_blocks"]) for row in rows] == [9, 20]
    assert int(rows[1]["lru_tokens_hit"]) == report.points[1].lru.tokens_hit
    assert float(rows[1]["optimum_block_hit_rate"]) == report.points[1].optimum.block_hit_rate
    with pytest.raises(TraceError, match="cannot write the table: Is a directory"):
        write_csv(report, str(tmp_path))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_picture_is_drawn(settings, tmp_path, suffix):
    path = tmp_path / f"curve{suffix}"
    draw_curves(measure_curves(settings), str(path))
    assert path.stat().st_size > 5000
    with pytest.raises(TraceError, match="its name must end in"):
        draw_curves(measure_curves(settings, [20]), str(tmp_path / "curve.xyz"))


def test_knee_is_farthest_above_the_straight_line():
    assert locate_knee([10, 100, 1000, 10_000], [0.0, 0.5, 0.55, 0.6]) == 100
    assert locate_knee([10, 100, 1000, 10_000], [0.0, 0.1, 0.2, 0.6]) is None
    assert locate_knee([10, 100], [0.0, 0.5]) is None


def test_trace_without_full_blocks_has_a_flat_curve(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [record(5, [1]), record(5, [1])])
    report = measure_curves(ReplaySettings(str(path), 1, trace_block_size=8))
    assert [(point.num_blocks, point.lru.token_hit_rate) for point in report.points] == [(1, 0.0)]
    assert report.points[0].optimum.block_hit_rate == 0.0


def test_lru_is_never_above_the_optimum_of_a_report(tmp_path):
    for seed in range(6):
        path = write_trace(tmp_path / "trace.jsonl", make_repeating_records(seed, 90, 8))
        for convention in ("full_blocks_cap", "ids_as_blocks"):
            report = measure_curves(
                ReplaySettings(str(path), 1, trace_block_size=8, convention=convention), range(1, 90)
            )
            for point in report.points:
                assert point.lru.block_hit_rate <= point.optimum.block_hit_rate
                assert point.lru.token_hit_rate <= point.optimum.token_hit_rate
                assert point.optimum.token_hit_rate <= report.infinite_cache.token_hit_rate
