"""The path of the socket, in a folder that only its owner can enter."""

import os
import socket
import stat
from contextlib import contextmanager

import pytest

from kv_pool import ControlError
from kv_pool.control.socket_path import (
    find_path,
    get_default_path,
    list_nodes,
    make_folder,
    resolve_path,
)


def test_the_default_is_in_the_runtime_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert get_default_path() == tmp_path / "kv_pool" / "control.sock"


def test_without_a_runtime_folder_a_user_folder_is_the_default(monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert get_default_path().parent.name == f"kv_pool-{os.getuid()}"


def test_the_folder_is_open_to_its_owner_only(tmp_path):
    path = tmp_path / "new" / "control.sock"
    make_folder(path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_existing_folder_is_left_unchanged(tmp_path):
    tmp_path.chmod(0o755)
    make_folder(tmp_path / "control.sock")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_default_folder_open_to_others_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "kv_pool"
    folder.mkdir()
    folder.chmod(0o777)
    for use in (lambda: resolve_path(None), lambda: make_folder(folder / "control.sock")):
        with pytest.raises(ControlError, match="not a folder that only you can enter"):
            use()


def test_default_folder_that_is_a_link_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "kv_pool").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ControlError, match="not a folder that only you can enter"):
        resolve_path(None)


def test_path_too_long_for_a_socket_is_refused(tmp_path):
    with pytest.raises(ControlError, match=r"has \d+ bytes; a socket's path has at most 10\d"):
        resolve_path(tmp_path / ("x" * 108))


def test_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ControlError, match="cannot create this folder"):
        make_folder(tmp_path / "file" / "folder" / "control.sock")


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "kv_pool").mkdir(mode=0o700)
    return tmp_path / "kv_pool"


@contextmanager
def listening(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        yield


def test_node_has_its_own_socket(runtime):
    assert get_default_path("a") == runtime / "control-a.sock"
    assert find_path(None, "a") == runtime / "control-a.sock"
    assert find_path("here.sock", None).name == "here.sock"
    with pytest.raises(ControlError, match="either --socket or --node"):
        find_path("here.sock", "a")


def test_default_is_the_plain_socket_or_that_of_the_only_node(runtime):
    assert find_path(None, None) == runtime / "control.sock"
    with listening(runtime / "control-a.sock"):
        assert list_nodes() == ["a"]
        assert find_path(None, None) == runtime / "control-a.sock"
        with pytest.raises(ControlError, match="node a is the target and the only pool that is served"):
            find_path(None, None, not_node="a")
        with listening(runtime / "control-b.sock"):
            with pytest.raises(ControlError, match="several pools are served: a, b; choose one with"):
                find_path(None, None)
            assert find_path(None, None, not_node="b") == runtime / "control-a.sock"
            with listening(runtime / "control.sock"):
                assert find_path(None, None) == runtime / "control.sock"


def test_socket_of_a_stopped_node_is_ignored(runtime):
    with listening(runtime / "control-a.sock"):
        pass
    assert (runtime / "control-a.sock").exists()
    assert list_nodes() == []
    assert find_path(None, None) == runtime / "control.sock"
