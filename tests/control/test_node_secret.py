"""The secret of one user's nodes."""

import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from kv_pool import ControlError, InvalidArgumentError
from kv_pool.control.node_secret import find_secret, get_default_secret_path


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_it_is_made_once_and_is_its_owners(runtime):
    secret = find_secret(None)
    assert len(secret) >= 16
    assert find_secret(None) == secret
    path = get_default_secret_path()
    assert path == runtime / "kv_pool" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in path.parent.iterdir()] == ["secret"]


def test_nodes_that_begin_at_once_have_one_secret(runtime):
    with ThreadPoolExecutor(8) as executor:
        secrets = set(executor.map(lambda _: find_secret(None), range(32)))
    assert len(secrets) == 1


def test_a_file_that_is_named_is_read_and_never_made(runtime):
    with pytest.raises(InvalidArgumentError, match="can not read the shared secret"):
        find_secret(str(runtime / "mine"))
    (runtime / "mine").write_bytes(b"0123456789abcdef\n")
    (runtime / "mine").chmod(0o600)
    assert find_secret(str(runtime / "mine")) == b"0123456789abcdef"


def test_a_folder_that_others_can_enter_keeps_no_secret(runtime):
    (runtime / "kv_pool").mkdir()
    (runtime / "kv_pool").chmod(0o777)
    with pytest.raises(ControlError, match="not a folder that only you can enter"):
        find_secret(None)
