"""Tests of the pictures of breakdowns."""

import struct
from xml.etree import ElementTree

import pytest

from kv_pool import InvalidArgumentError
from kv_pool.lab.pictures.hit_rates import draw_breakdowns
from kv_pool.lab.report import ReplayReport
from kv_pool.lab.request_outcomes import BREAKDOWNS, BreakdownRow


def make_report(*kinds, num_rows=4):
    rows = {}
    for kind in kinds:
        is_named = kind in ("session", "tenant")
        keys = [f"{kind}-{number}" if is_named else number for number in range(num_rows)]
        rows[kind] = [
            BreakdownRow(key, 1, 0, 100 + at, 50, token_hit_rate=0.5) for at, key in enumerate(keys)
        ]
    return ReplayReport(16, 9, "full_blocks", "instant", 5, token_hit_rate=0.4, breakdowns=rows)


def draw(tmp_path, report):
    path = tmp_path / "picture.svg"
    draw_breakdowns(report, str(path))
    ElementTree.parse(path)
    return path.read_text()


def test_each_breakdown_has_a_panel(tmp_path):
    path = tmp_path / "picture.png"
    draw_breakdowns(make_report(*BREAKDOWNS), str(path))
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert (width, height) == (1080, 480 * len(BREAKDOWNS))


def test_axes_are_labelled(tmp_path):
    picture = draw(tmp_path, make_report(*BREAKDOWNS))
    for text in (
        "turn of the session",
        "minute of arrival",
        "position in the prompt, tokens",
        "prompt tokens",
    ):
        assert f"<!-- {text} -->" in picture
    assert "<!-- token hit rate by tenant -->" in picture
    assert "<!-- session-3 -->" in picture


def test_largest_sessions_are_drawn(tmp_path):
    picture = draw(tmp_path, make_report("session", num_rows=40))
    assert "token hit rate by session, the 25 largest of 40" in picture
    assert "<!-- session-39 -->" in picture
    assert "<!-- session-3 -->" not in picture


def test_requests_without_a_key_have_a_bar_and_no_point(tmp_path):
    report = make_report("tenant", "turn")
    for rows in report.breakdowns.values():
        rows.append(BreakdownRow(None, 1, 0, 10, 5, token_hit_rate=0.5))
    assert "<!-- none -->" in draw(tmp_path, report)


def test_empty_reports_are_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="replay with --by"):
        draw_breakdowns(make_report(), str(tmp_path / "picture.png"))
