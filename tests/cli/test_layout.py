"""`kv-pool layout`: a running pool's memory map, as text, as a file, as JSON."""

import msgspec
import pytest
from cli.kv_pool_command import kv_pool_command
from control.made_layout import make_sixteen

from kv_pool.control.server import ControlServer
from kv_pool.reports import PoolLayout


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Serve a pool at `pool.sock` in the current folder, whose absolute path may be too long for a socket."""
    monkeypatch.chdir(tmp_path)
    pool = make_sixteen()
    with ControlServer(pool, "pool.sock"):
        yield pool


def layout(folder, *options):
    return kv_pool_command("layout", "--socket", "pool.sock", *options, cwd=folder)


def test_map_is_printed_in_signs_without_a_terminal(pool, tmp_path):
    done = layout(tmp_path)
    assert done.returncode == 0, done.stderr
    assert " 0 0###%P#==___%:#..\n" in done.stdout
    assert "P  in use, held in place             1  6.2%\n" in done.stdout


def test_rows_have_the_requested_width(pool, tmp_path):
    done = layout(tmp_path, "--width", "8")
    assert " 0 0###%P#=\n 8 =___%:#.\n16 .\n" in done.stdout


@pytest.mark.parametrize(("name", "start"), [("map.svg", b"<?xml"), ("map.png", b"\x89PNG\r\n\x1a\n")])
def test_map_is_drawn_to_the_named_file(pool, tmp_path, name, start):
    done = layout(tmp_path, "-o", name)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"memory map: {name}\n"
    assert (tmp_path / name).read_bytes().startswith(start)


def test_json_is_only_the_layout(pool, tmp_path):
    done = layout(tmp_path, "--json")
    assert msgspec.json.decode(done.stdout, type=PoolLayout) == pool.get_layout()


def test_impossible_picture_is_refused_before_connecting(tmp_path):
    done = layout(tmp_path, "-o", "nowhere/map.png")
    assert done.returncode == 2
    nowhere = tmp_path / "nowhere"
    assert done.stderr == f"error: nowhere/map.png: cannot write the picture: there is no folder {nowhere}\n"


def test_without_a_running_pool_it_is_an_error(tmp_path):
    done = layout(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no pool is served at pool.sock")
