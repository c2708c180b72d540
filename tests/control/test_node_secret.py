"""The secret of one user's nodes."""

import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from kv_pool import ControlError, InvalidArgumentError
from kv_pool.control.live_node import load_or_create_secret


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_secret_is_created_once_and_only_its_owner_can_read_it(runtime):
    secret = load_or_create_secret(None)
    assert len(secret) >= 16
    assert load_or_create_secret(None) == secret
    path = runtime / "kv_pool" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [found.name for found in path.parent.iterdir()] == ["secret"]


def test_nodes_that_start_together_share_one_secret(runtime):
    with ThreadPoolExecutor(8) as executor:
        secrets = set(executor.map(lambda _: load_or_create_secret(None), range(32)))
    assert len(secrets) == 1


def test_secret_that_a_killed_node_was_writing_is_written_again(runtime):
    (runtime / "kv_pool").mkdir(mode=0o700)
    (runtime / "kv_pool" / "secret.new").write_bytes(b"half")
    assert len(load_or_create_secret(None)) == 64


def test_named_file_is_read_and_never_created(runtime):
    with pytest.raises(InvalidArgumentError, match="cannot read the shared secret"):
        load_or_create_secret(str(runtime / "mine"))
    (runtime / "mine").write_bytes(b"0123456789abcdef\n")
    (runtime / "mine").chmod(0o600)
    assert load_or_create_secret(str(runtime / "mine")) == b"0123456789abcdef"


def test_folder_open_to_others_is_refused_for_the_secret(runtime):
    (runtime / "kv_pool").mkdir()
    (runtime / "kv_pool").chmod(0o777)
    with pytest.raises(ControlError, match="not a folder that only you can enter"):
        load_or_create_secret(None)
