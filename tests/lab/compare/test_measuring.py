"""Tests of gaps and intervals: against numbers computed by hand, and against a slow bootstrap."""

import csv
import json
import random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from lab.compare.made_comparison import CountingExecutor, make_settings, write_random_trace
from lab.test_schemas import validator

from kv_pool import TraceError
from kv_pool.lab.compare.compare import compare_policies
from kv_pool.lab.compare.comparison import (
    Comparison,
    list_changed_inputs,
    list_differences,
    report_comparison,
)
from kv_pool.lab.compare.measuring import (
    compare_trace,
    find_interval,
    list_contradictions,
    resample,
    sum_by_unit,
)
from kv_pool.lab.compare.policy_run import Failure, PolicyRun, pack, unpack
from kv_pool.lab.compare.references import OptimumPoint, References
from kv_pool.lab.curves.curve_report import CurveCounts
from kv_pool.lab.report import InfiniteCache, make_provenance, write_csv_rows

SIZE = 10  # tokens per block


def make_run(hits, sizes):
    num_hits = sum(hits)
    return PolicyRun(
        blocks_hit=num_hits,
        tokens_hit=num_hits * SIZE,
        evictions=7,
        admitted=sum(sizes) - num_hits,
        seconds=1.5,
        hits=pack([(count, count * SIZE) for count in hits]),
    )


def make_references(sizes, units, best, lru, state="optimal"):
    of_lru, of_optimum = (CurveCounts(sum(hits), sum(hits) * SIZE, 0.0, 0.0) for hits in (lru, best))
    point = OptimumPoint(5, of_lru, of_optimum, pack(best))
    return References(
        block_size=SIZE,
        requests=len(sizes),
        blocks_looked_up=sum(sizes),
        tokens_in=sum(sizes) * SIZE,
        unit="root",
        units=len(set(units)),
        unit_of=pack(units),
        sizes=pack([(size, size * SIZE) for size in sizes]),
        infinite_cache=InfiniteCache(90, 50, 500, 0.5, 0.5),
        optimum_blocks=state,
        optimum_tokens=state,
        why_no_optimum=None,
        points=(point,),
    )


def compare(references, runs, num_samples=0, seed=0):
    settings = make_settings(["trace"], list(runs), [5])
    settings = msgspec.structs.replace(settings, resamples=num_samples, seed=seed)
    at_five = {(policy, 5): run for policy, run in runs.items()}
    provenance = make_provenance(SimpleNamespace(path="trace", block_size=SIZE), "0" * 64, "0")
    return compare_trace(settings, settings.traces[0], references, at_five, provenance).rows


def test_rates_and_gaps_are_those_computed_by_hand():
    sizes, units = [40, 30, 30], [0, 1, 0]
    lru, best = [0, 10, 10], [20, 20, 20]
    runs = {
        "lru": make_run(lru, sizes),
        "new": make_run([10, 10, 15], sizes),
        "bad": make_run([0, 0, 10], sizes),
    }
    rows = compare(make_references(sizes, units, best, lru), runs)
    by_name = {row.policy: row for row in rows}
    # 100 blocks: LRU hits 20, the optimum 60; the gap is 40 blocks.
    assert [row.gap_closed for row in rows] == [0, 15 / 40, -10 / 40, 1, None]
    assert [row.above_lru for row in rows] == pytest.approx([0, 0.15, -0.1, 0.4, None])
    new = by_name["new"]
    assert (new.block_hit_rate, new.token_hit_rate) == (0.35, 0.35)
    assert (new.blocks_hit, new.blocks_missed, new.tokens_hit) == (35, 65, 350)
    assert (new.evictions, new.admitted, new.seconds) == (7, 65, 1.5)
    assert (by_name["optimum"].blocks_hit, by_name["optimum"].evictions) == (60, None)
    assert (by_name["infinite"].num_blocks, by_name["infinite"].blocks_hit) == (90, 50)
    assert new.gap_closed_low is new.above_lru_high is None  # there were no samples


def test_without_a_gap_no_share_of_it_is_closed():
    sizes, units, hits = [10, 10], [0, 1], [1, 2]
    run = make_run(hits, sizes)
    rows = compare(make_references(sizes, units, hits, hits), {"lru": run, "same": run}, 50)
    assert [row.gap_closed for row in rows] == [None] * 4
    assert [row.gap_closed_low for row in rows] == [None] * 4
    assert (rows[1].above_lru_low, rows[1].above_lru_high) == (0, 0)


def test_gap_that_some_samples_lack_has_no_interval():
    sizes, units = [10, 10], [0, 1]
    lru, best, new = [0, 2], [4, 2], [2, 2]
    runs = {"lru": make_run(lru, sizes), "new": make_run(new, sizes)}
    row = compare(make_references(sizes, units, best, lru), runs, 50)[1]
    assert row.gap_closed == 0.5
    assert row.gap_closed_low is row.gap_closed_high is None  # some samples have the second unit only
    assert row.above_lru_low == 0


def test_one_unit_has_no_intervals():
    sizes = [10, 10]
    runs = {"lru": make_run([0, 2], sizes), "new": make_run([2, 2], sizes)}
    row = compare(make_references(sizes, [0, 0], [4, 2], [0, 2]), runs, 50)[1]
    assert (row.gap_closed, row.gap_closed_low, row.above_lru_low) == (0.5, None, None)


def slow_bootstrap(units, sizes, lru, new, best, num_samples, seed):
    """Return the samples of the difference and of the share of the gap, unit by unit."""
    generator = np.random.default_rng(seed)
    num_units = len(set(units))
    members = [[place for place, unit in enumerate(units) if unit == number] for number in range(num_units)]
    differences, shares = [], []
    for _ in range(num_samples):
        chosen = [
            place for number in generator.integers(num_units, size=num_units) for place in members[number]
        ]

        def add(counts, chosen=chosen):
            return sum(counts[place] for place in chosen)

        differences.append((add(new) - add(lru)) / add(sizes))
        shares.append((add(new) - add(lru)) / (add(best) - add(lru)))
    return differences, shares


@pytest.mark.parametrize("seed", range(3))
def test_intervals_equal_those_of_a_slow_bootstrap(seed):
    rng = random.Random(seed)
    units = [number if number < 15 else rng.randrange(15) for number in range(60)]
    sizes = [rng.randrange(5, 20) for _ in units]
    best = [rng.randrange(4, size) for size in sizes]
    lru = [rng.randrange(0, max(1, count // 2)) for count in best]
    new = [rng.randrange(0, count) for count in best]
    runs = {"lru": make_run(lru, sizes), "new": make_run(new, sizes)}
    row = compare(make_references(sizes, units, best, lru), runs, 100, seed)[1]
    differences, shares = slow_bootstrap(units, sizes, lru, new, best, 100, seed)
    assert (row.above_lru_low, row.above_lru_high) == pytest.approx(np.quantile(differences, [0.025, 0.975]))
    assert (row.gap_closed_low, row.gap_closed_high) == pytest.approx(np.quantile(shares, [0.025, 0.975]))
    assert row.gap_closed_low < row.gap_closed < row.gap_closed_high


def test_failed_runs_have_no_results():
    sizes, units, hits = [10, 10], [0, 1], [1, 2]
    failure = Failure("CachePolicyError", "the cache policy new is broken")
    references = make_references(sizes, units, [4, 4], hits)
    rows = compare(references, {"lru": make_run(hits, sizes), "new": failure}, 20)
    assert rows[1].error == "CachePolicyError: the cache policy new is broken"
    assert rows[2].gap_closed == 1
    rows = compare(references, {"lru": failure, "new": make_run(hits, sizes)}, 20)
    assert (rows[1].blocks_hit, rows[1].above_lru, rows[1].gap_closed) == (3, None, None)


def test_policies_above_the_optimum_are_contradictions():
    sizes, units, lru, best = [10, 10], [0, 1], [1, 2], [4, 5]
    references = make_references(sizes, units, best, lru)
    compared = make_settings(["trace"], [], [5]).traces[0]
    fine = {("lru", 5): make_run(lru, sizes), ("new", 5): make_run(best, sizes), ("x", 5): Failure("E", "")}
    assert list(list_contradictions(compared, references, fine, "trace")) == []
    wrong = {("lru", 5): make_run([1, 1], sizes), ("new", 5): make_run([5, 5], sizes)}
    first, second = list_contradictions(compared, references, wrong, "trace")
    assert first.startswith(
        "trace: lru at 5 blocks has 2 block hits and 20 token hits in the replay, 3 and 30"
    )
    assert second.endswith("has 10 block hits and 100 token hits, above the optimum of 9 and 90")


def test_damaged_counts_are_an_error():
    assert unpack(pack([(1, 2), (3, 4)]), 2, 2).tolist() == [[1, 2], [3, 4]]
    for packed, number in ((b"?", 1), (pack([1, 2, 3]), 2), (b"", 0)):
        with pytest.raises(TraceError, match="are damaged"):
            unpack(packed, number, 2)


def test_sums_and_intervals():
    counts = np.array([[1, 10], [2, 20], [3, 30]])
    assert sum_by_unit(counts, np.array([1, 0, 1]), 2).tolist() == [[2, 20], [4, 40]]
    sums = resample(counts, 40, 0)
    assert sums.shape == (40, 2)
    assert (sums[:, 1] == 10 * sums[:, 0]).all()
    assert (sums == resample(counts, 40, 0)).all()
    assert (sums != resample(counts, 40, 1)).any()
    assert find_interval(np.arange(1001.0)) == pytest.approx((25, 975))
    assert find_interval(np.array([])) == find_interval(np.array([1, np.nan])) == (None, None)


@pytest.fixture
def comparison(tmp_path):
    path = write_random_trace(tmp_path / "trace.jsonl", 5)
    return compare_policies(make_settings([path], ["sieve"], block_bytes=64), CountingExecutor())


def test_csv_has_the_rows_of_the_comparison(comparison, tmp_path):
    path = tmp_path / "compare.csv"
    write_csv_rows(str(path), report_comparison(comparison).records)
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(comparison.traces[0].rows) == 7
    for row, expected in zip(rows, comparison.traces[0].rows, strict=True):
        assert row["trace"] == comparison.traces[0].provenance.trace
        assert int(row["bytes"]) == 64 * expected.num_blocks
        for name in expected.__struct_fields__:
            value = getattr(expected, name)
            assert row[name] == ("" if value is None else str(value))
    with pytest.raises(TraceError, match="cannot write the table"):
        write_csv_rows(str(tmp_path), report_comparison(comparison).records)


def test_json_matches_the_schema(comparison):
    schema = validator("compare")
    found = json.loads(msgspec.json.encode(comparison))
    schema.validate(found)
    found["traces"][0]["rows"][0]["blocks_hit"] = "1"
    assert not schema.is_valid(found)


def test_differences_are_named(comparison):
    again = msgspec.json.decode(msgspec.json.encode(comparison), type=Comparison)
    again.traces[0].rows[1].seconds = 100.0
    again.traces[0].rows[1].gap_closed_low += 1e-13  # another order of additions
    assert [*list_differences(comparison, again), *list_changed_inputs(comparison, again)] == []
    again.traces[0].rows[1].evictions += 1
    again.traces[0].rows[2].token_hit_rate += 0.01
    trace = again.traces[0].provenance.trace
    evictions = comparison.traces[0].rows[1].evictions
    first, second = list_differences(comparison, again)
    assert first == f"{trace}, sieve at 12 blocks: evictions is {evictions + 1}, was {evictions}"
    assert "optimum at 12 blocks: token_hit_rate is" in second
    again.traces[0].provenance.trace_sha256 = "1" * 64
    again.traces[0].provenance.kv_pool = "99"
    again.policies[1] = msgspec.structs.replace(again.policies[1], sha256="2" * 64)
    del again.traces[0].rows[3:]
    changed = list(list_changed_inputs(comparison, again))
    assert [line.split(" has changed")[0] for line in changed[::2]] == [
        f"the trace {trace}",
        "the policy sieve",
    ]
    assert changed[1].startswith("kv_pool is version 99, was ")
    assert next(list_differences(comparison, again)) == f"{trace}: 3 rows, there were 7"
