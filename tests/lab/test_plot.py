"""Tests of the hit-rate picture."""

import struct
from xml.etree import ElementTree

import msgspec
import pytest

from kv_pool import InvalidArgumentError, TraceError
from kv_pool.lab.pictures.hit_rates import count_capacity, draw_hit_rates
from kv_pool.lab.report import InfiniteCache, Provenance, ReplayReport, TierReport

REPORTS = [
    ReplayReport(16, size, "full_blocks", "instant", 5, token_hit_rate=rate, block_hit_rate=rate)
    for size, rate in ((1000, 0.5), (10, 0.0), (100, 0.25))
]


def test_curve_is_drawn_as_png(tmp_path):
    path = tmp_path / "curve.png"
    draw_hit_rates(REPORTS, str(path))
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1080, 660)


def test_tiers_are_separate_lines_over_total_capacity(tmp_path):
    path = tmp_path / "curve.svg"
    tiered = [
        ReplayReport(16, 10, "full_blocks", "instant", 5, tiers=[TierReport("CPU", size)])
        for size in (990, 90)
    ]
    draw_hit_rates([*REPORTS, *tiered], str(path))
    assert count_capacity(tiered[0]) == 1000
    picture = path.read_text()
    assert "the pool alone" in picture
    assert "10 in the pool, others in host memory" in picture
    assert "of full prompt blocks" not in picture


def draw(tmp_path, reports, **overlays):
    path = tmp_path / "curve.svg"
    draw_hit_rates(reports, str(path), overlays)
    return path.read_text()


def make(num_blocks, block_size=16, **settings):
    return ReplayReport(block_size, num_blocks, "full_blocks", "instant", 5, settings=settings)


def test_infinite_cache_is_drawn_as_a_line(tmp_path):
    assert "infinite cache" not in draw(tmp_path, REPORTS)
    bound = InfiniteCache(500, 3, 24, 0.6, 0.6)
    reports = [msgspec.structs.replace(report, infinite_cache=bound) for report in REPORTS]
    assert "of prompt tokens, infinite cache" in draw(tmp_path, reports)


def test_capacity_is_in_gib_if_block_bytes_are_known(tmp_path):
    known = [make(num_blocks, block_bytes=2**20) for num_blocks in (1024, 5120)]
    assert "capacity in GiB" in draw(tmp_path, known)
    assert "capacity in blocks of 16 tokens" in draw(tmp_path, known, other=REPORTS)
    assert "capacity in tokens" in draw(tmp_path, known, other=[make(10, block_size=32)])


def test_overlaid_sweeps_are_named_by_their_differences(tmp_path):
    picture = draw(
        tmp_path, [make(10, groups="full", seed="0")], other=[make(20, groups="window:9", seed="0")]
    )
    assert "<!-- groups full -->" in picture
    assert "<!-- groups window:9 -->" in picture
    assert "seed" not in picture
    assert "of full prompt blocks" not in picture


def test_names_are_drawn_without_control_characters(tmp_path):
    """Matplotlib parses text between two dollar signs as a formula, and refuses `$\\frac$`."""
    provenance = {"command": [], "date": "", "kv_pool": "", "compiled": False, "python": "", "platform": ""}
    rest = {"dependencies": {}, "trace_sha256": "", "trace_block_size": None, "seed": ""}

    def replayed(name):
        told = Provenance(trace=name, **provenance, **rest)
        return [msgspec.structs.replace(make(10), provenance=told)]

    names = [r"cost_$x$_and_$\frac$.jsonl", r"$HOME$\frac$.jsonl"]
    assert f"<!-- {names[0]}" in draw(tmp_path, replayed(names[0]))
    picture = draw(tmp_path, replayed(names[0]), **{"sweep.json": replayed(names[1])})
    assert all(f"<!-- {name} -->" in picture for name in names)
    ElementTree.fromstring(draw(tmp_path, replayed("漢字 \x1b]0;title\x07.jsonl")))
    equal = draw(tmp_path, [make(10)], **{r"a$\frac$.json": [make(20)]})
    assert r"<!-- a$\frac$.json -->" in equal


def test_equal_sweeps_are_named_by_their_files(tmp_path):
    picture = draw(tmp_path, [make(10)], **{"earlier/sweep.json": [make(20)]})
    assert "<!-- this sweep -->" in picture
    assert "<!-- sweep.json -->" in picture


def test_tiers_are_drawn_with_the_fewest_lines(tmp_path):
    tiered = [
        ReplayReport(
            16, size, "full_blocks", "instant", 5, tiers=[TierReport("CPU", 7), TierReport("STORAGE", 9)]
        )
        for size in (10, 20, 30)
    ]
    assert "the pool, with 7 in host memory and 9 in a disk tier" in draw(tmp_path, [*REPORTS, *tiered])


def test_no_reports_are_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="no reports to draw"):
        draw(tmp_path, [])
    with pytest.raises(InvalidArgumentError, match="no reports to draw"):
        draw(tmp_path, REPORTS, other=[])


@pytest.mark.parametrize("name", ["nowhere/curve.png", "curve.xyz"])
def test_unwritable_picture_raises(tmp_path, name):
    with pytest.raises(TraceError, match=f"{name}: cannot write the picture"):
        draw_hit_rates(REPORTS, str(tmp_path / name))
