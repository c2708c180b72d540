"""The hit-rate curve as a file."""

import struct

import pytest

from kv_pool import TraceError
from kv_pool.replay.plot import count_capacity, draw_hit_rates
from kv_pool.replay.report import ReplayReport, TierReport

REPORTS = [
    ReplayReport(16, size, "full_blocks", "instant", 5, token_hit_rate=rate, block_hit_rate=rate)
    for size, rate in ((1000, 0.5), (10, 0.0), (100, 0.25))
]


def test_the_curve_is_drawn_as_png(tmp_path):
    path = tmp_path / "curve.png"
    draw_hit_rates(REPORTS, str(path))
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1080, 660)


def test_the_curve_is_drawn_as_svg_where_the_name_says_so(tmp_path):
    path = tmp_path / "curve.svg"
    draw_hit_rates(REPORTS, str(path))
    assert "<svg" in path.read_text()


def test_one_report_is_enough_for_a_picture(tmp_path):
    path = tmp_path / "curve.png"
    draw_hit_rates(REPORTS[:1], str(path))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_tiers_are_lines_of_their_own_over_all_the_capacity(tmp_path):
    path = tmp_path / "curve.svg"
    tiered = [
        ReplayReport(16, 10, "full_blocks", "instant", 5, tiers=[TierReport("CPU", size)])
        for size in (990, 90)
    ]
    draw_hit_rates([*REPORTS, *tiered], str(path))
    assert count_capacity(tiered[0]) == 1000
    picture = path.read_text()
    assert "the pool alone" in picture
    assert "10 in the pool, others in tiers" in picture
    assert "of full prompt blocks" not in picture


@pytest.mark.parametrize("name", ["nowhere/curve.png", "curve.xyz"])
def test_a_picture_that_can_not_be_written_is_an_error(tmp_path, name):
    with pytest.raises(TraceError, match=f"{name}: can not write the picture"):
        draw_hit_rates(REPORTS, str(tmp_path / name))
