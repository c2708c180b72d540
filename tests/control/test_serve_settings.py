"""Settings: the command line overrides the file, the file the defaults; errors name the setting."""

import json
from dataclasses import fields

import pytest

from kv_pool import BlockAllocationRequest, InvalidArgumentError
from kv_pool.control.serve_settings import ServeSettings, open_pool, read_settings


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "serve.toml"
        path.write_text(text)
        return str(path)

    return write


def test_settings_without_options_are_the_defaults():
    assert read_settings(None, {"blocks": None, "socket": None}) == ServeSettings()


def test_file_overrides_the_defaults(config):
    settings = read_settings(config("blocks = 500\ndefrag_threshold = 0.25\nspeedup = 2\n"), {})
    assert (settings.blocks, settings.defrag_threshold, settings.speedup) == (500, 0.25, 2.0)
    assert settings.block_size == ServeSettings().block_size


def test_command_line_overrides_the_file(config):
    settings = read_settings(config("blocks = 500\nblock_size = 16\n"), {"blocks": 900, "block_size": None})
    assert (settings.blocks, settings.block_size) == (900, 16)


VALUES = {
    "trace": "mine.jsonl",
    "manager": True,
    "blocks": 1,
    "block_size": 2,
    "run_length": 3,
    "live_curve": True,
    "enable_defragmentation": False,
    "defrag_threshold": 0.4,
    "defrag_interval": 5.0,
    "defrag_moves": 6,
    "max_evictions": 7,
    "speedup": 8.0,
    "trace_block_size": 4,
    "timestamp_unit": "s",
    "duration": 9.0,
    "socket": "here.sock",
    "name": "a",
    "block_bytes": 512,
    "listen": "127.0.0.1:7401",
    "bulk_port": 7501,
    "peer": ["b=127.0.0.1:7402"],
    "nodes": "nodes.toml",
    "registry": "b",
    "secret_file": "secret",
    "backend": ["tcp", "nixl"],
    "max_rate": "1MB/s",
    "migration_threshold": 12,
    "network": "n1",
    "rack": "r1",
    "host": "h1",
    "device": "cuda:0",
    "host_tier": 10,
    "disk_tier": "cold",
    "disk_tier_blocks": 11,
    "publish": "tcp://127.0.0.1:5557",
    "publish_replay": "tcp://127.0.0.1:5558",
    "publish_config": "publisher.toml",
    "port": "9400",
    "token_file": "token",
    "certificate": "cert.pem",
    "key": "key.pem",
    "web": True,
}


def test_every_option_can_be_in_the_file(config):
    text = "\n".join(f"{name} = {json.dumps(value)}" for name, value in VALUES.items())
    assert read_settings(config(text), {}) == ServeSettings(**VALUES)
    assert VALUES.keys() == {field.name for field in fields(ServeSettings)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "block = 5",
            r"serve.toml: unknown key 'block'; did you mean 'blocks'\? known are trace, blocks, .*socket",
        ),
        ("[pool]\nblocks = 5", "serve.toml: unknown key 'pool'"),
        ("blocks = 0", "serve.toml: blocks: Expected `int` >= 1"),
        ('blocks = "many"', "serve.toml: blocks: Expected `int`, got `str`"),
        ("defrag_threshold = 1.5", "serve.toml: defrag_threshold: Expected `float` <= 1"),
        ("blocks =", "serve.toml: this is not TOML"),
    ],
)
def test_invalid_setting_in_the_file_is_named_in_the_error(config, text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        read_settings(config(text), {"blocks": 10})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("blocks", 0),
        ("block_size", -1),
        ("defrag_threshold", -0.1),
        ("defrag_interval", -1),
        ("defrag_moves", 0),
        ("max_evictions", -1),
        ("speedup", 0.0),
        ("duration", 0.0),
    ],
)
def test_invalid_option_is_named_in_the_error(name, value):
    with pytest.raises(InvalidArgumentError, match=f"^{name}: Expected"):
        read_settings(None, {name: value})


def test_missing_settings_file_is_an_error():
    with pytest.raises(InvalidArgumentError, match=r"nowhere.toml: cannot read the settings: No such file"):
        read_settings("nowhere.toml", {})


def test_sizes_accept_the_names_of_engine_options(config):
    settings = read_settings(config("kv_pool_size = 500\nkv_block_size = 16\n"), {})
    assert (settings.blocks, settings.block_size) == (500, 16)
    with pytest.raises(
        InvalidArgumentError, match="kv_pool_size is another name of blocks; give one of them"
    ):
        read_settings(config("blocks = 500\nkv_pool_size = 500\n"), {})


def test_disabled_defragmentation_never_compacts(config):
    _, defragmenter = open_pool(config("defrag_threshold = 0.2\n"))
    assert defragmenter.threshold == 0.2
    _, defragmenter = open_pool(config("defrag_threshold = 0.2\nenable_defragmentation = false\n"))
    assert defragmenter.threshold == 1.0


def test_engine_pool_is_created_from_the_same_file(config):
    path = config("kv_pool_size = 500\nkv_block_size = 16\nrun_length = 8\ndefrag_interval = 0\n")
    pool, defragmenter = open_pool(path, device_id=3)
    assert (pool.total_blocks, pool.block_size, pool.run_length, pool.device_id) == (500, 16, 8, 3)
    for sequence_id in range(250):
        pool.allocate(BlockAllocationRequest(num_blocks=2, sequence_id=sequence_id))
    for sequence_id in range(0, 250, 2):
        pool.free_sequence(sequence_id)
    before = pool.get_fragmentation_rate()
    while defragmenter.step():
        pass
    assert pool.get_fragmentation_rate() < before
    # The next allocation evicts the least recently used sequence.
    pool.allocate(BlockAllocationRequest(num_blocks=252, sequence_id=1000))
    assert 1 not in pool.list_sequences()
    with pytest.raises(InvalidArgumentError, match="unknown key 'kv_pool_sizes'"):
        open_pool(config("kv_pool_sizes = 1"))
