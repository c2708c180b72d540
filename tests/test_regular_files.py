"""Only regular files are read by name; a pipe or a device is refused without waiting."""

import os

import pytest

from kv_pool import BlockPool
from kv_pool.control.serve_settings import read_settings
from kv_pool.events.curve_keys import load_public_key
from kv_pool.events.event_publisher import PublisherConfig
from kv_pool.migration.secret import load_secret
from kv_pool.migration.topology import read_peers, read_topology
from kv_pool.regular_files import open_private, open_private_folder, open_regular
from kv_pool.tiers.pool_dump import load_pool, read_header

READERS = [
    load_secret,
    read_peers,
    read_topology,
    read_header,
    lambda path: read_settings(str(path), {}),
    lambda path: load_pool(path, BlockPool(4, True, 4)),
    lambda path: load_public_key("a key", path),
    PublisherConfig.from_toml,
    open_regular,
]
NAMES = [
    "secret",
    "peers",
    "topology",
    "dump header",
    "settings",
    "dump",
    "curve key",
    "publisher",
    "any",
]


@pytest.mark.parametrize("read", READERS, ids=NAMES)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_pipe_is_refused_without_waiting(tmp_path, read, kind):
    """`--secret-file` with a FIFO used to hang for ever."""
    path = tmp_path / "it"
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises((ValueError, OSError), match="it is not a regular file"):
        read(path)


def test_refused_file_is_closed(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    before = os.listdir("/proc/self/fd")
    folder = open_private_folder(tmp_path)
    for name in ("pipe", "nothing"):
        with pytest.raises(OSError, match=name):
            open_private(name, os.O_RDONLY, folder)
    os.close(folder)
    assert os.listdir("/proc/self/fd") == before


def test_regular_file_is_read_through_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    with open(open_regular(tmp_path / "link"), "rb") as file:
        assert file.read() == b"content"
