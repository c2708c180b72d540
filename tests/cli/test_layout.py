"""`kv-pool layout`: a running pool's memory map, as text, as a file, as JSON."""

import msgspec
import pytest
from cli.kv_pool_command import kv_pool_command
from control.made_layout import make_sixteen

from kv_pool.control.server import ControlServer
from kv_pool.reports import PoolLayout


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Served at `pool.sock` in the current folder, whose own name may be too long for a socket."""
    monkeypatch.chdir(tmp_path)
    pool = make_sixteen()
    with ControlServer(pool, "pool.sock"):
        yield pool


def layout(folder, *options):
    return kv_pool_command("layout", "--socket", "pool.sock", *options, cwd=folder)


def test_the_map_is_printed_in_signs_where_there_is_no_terminal(pool, tmp_path):
    done = layout(tmp_path)
    assert done.returncode == 0, done.stderr
    assert " 0 0███▓P█==___▓:█..\n" in done.stdout
    assert "P  in use, held in place                          1     6.2%\n" in done.stdout


def test_rows_are_as_wide_as_asked(pool, tmp_path):
    done = layout(tmp_path, "--width", "8")
    assert " 0 0███▓P█=\n 8 =___▓:█.\n16 .\n" in done.stdout


@pytest.mark.parametrize(("name", "start"), [("map.svg", b"<?xml"), ("map.png", b"\x89PNG\r\n\x1a\n")])
def test_the_map_is_drawn_where_asked(pool, tmp_path, name, start):
    done = layout(tmp_path, "-o", name)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"memory map: {name}\n"
    assert (tmp_path / name).read_bytes().startswith(start)


def test_json_is_the_layout_and_nothing_else(pool, tmp_path):
    done = layout(tmp_path, "--json")
    assert msgspec.json.decode(done.stdout, type=PoolLayout) == pool.get_layout()


def test_a_picture_that_can_not_be_drawn_is_refused_before_the_pool_is_asked(tmp_path):
    done = layout(tmp_path, "-o", "nowhere/map.png")
    assert done.returncode == 2
    nowhere = tmp_path / "nowhere"
    assert done.stderr == f"error: nowhere/map.png: can not write the picture: there is no folder {nowhere}\n"


def test_without_a_running_pool_it_says_so(tmp_path):
    done = layout(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no pool is served at pool.sock")
