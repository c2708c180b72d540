"""Settings: the command line wins over the file, the file over the defaults; what is wrong is named."""

import pytest

from kv_pool import InvalidArgumentError
from kv_pool.control.serve_settings import ServeSettings, read_settings


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "serve.toml"
        path.write_text(text)
        return str(path)

    return write


def test_without_anything_it_is_the_defaults():
    assert read_settings(None, {"blocks": None, "socket": None}) == ServeSettings()


def test_the_file_wins_over_the_defaults(config):
    settings = read_settings(config("blocks = 500\ndefrag_threshold = 0.25\nspeedup = 2\n"), {})
    assert (settings.blocks, settings.defrag_threshold, settings.speedup) == (500, 0.25, 2.0)
    assert settings.block_size == ServeSettings().block_size


def test_the_command_line_wins_over_the_file(config):
    settings = read_settings(config("blocks = 500\nblock_size = 16\n"), {"blocks": 900, "block_size": None})
    assert (settings.blocks, settings.block_size) == (900, 16)


def test_every_option_can_be_in_the_file(config):
    text = """
        trace = "mine.jsonl"
        blocks = 1
        block_size = 2
        run_length = 3
        defrag_threshold = 0.4
        defrag_interval = 5
        defrag_moves = 6
        max_evictions = 7
        speedup = 8.0
        trace_block_size = 4
        timestamp_unit = "s"
        duration = 9
        socket = "here.sock"
        name = "a"
        block_bytes = 512
        listen = "127.0.0.1:7401"
        peer = ["b=127.0.0.1:7402"]
        nodes = "nodes.toml"
        registry = "b"
        secret_file = "secret"
        max_rate = "1MB/s"
        offload_threshold = 12
        network = "n1"
        rack = "r1"
        host = "h1"
        device = "cuda:0"
        host_tier = 10
        disk_tier = "cold"
        disk_tier_blocks = 11
        publish = "tcp://127.0.0.1:5557"
        publish_replay = "tcp://127.0.0.1:5558"
        publish_config = "publisher.toml"
    """
    assert read_settings(config(text), {}) == ServeSettings(
        trace="mine.jsonl",
        blocks=1,
        block_size=2,
        run_length=3,
        defrag_threshold=0.4,
        defrag_interval=5,
        defrag_moves=6,
        max_evictions=7,
        speedup=8.0,
        trace_block_size=4,
        timestamp_unit="s",
        duration=9,
        socket="here.sock",
        name="a",
        block_bytes=512,
        listen="127.0.0.1:7401",
        peer=["b=127.0.0.1:7402"],
        nodes="nodes.toml",
        registry="b",
        secret_file="secret",
        max_rate="1MB/s",
        offload_threshold=12,
        network="n1",
        rack="r1",
        host="h1",
        device="cuda:0",
        host_tier=10,
        disk_tier="cold",
        disk_tier_blocks=11,
        publish="tcp://127.0.0.1:5557",
        publish_replay="tcp://127.0.0.1:5558",
        publish_config="publisher.toml",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block = 5", r"serve.toml: unknown key 'block'; known are trace, blocks, block_size, .*socket"),
        ("[pool]\nblocks = 5", "serve.toml: unknown key 'pool'"),
        ("blocks = 0", "serve.toml: blocks: Expected `int` >= 1"),
        ('blocks = "many"', "serve.toml: blocks: Expected `int`, got `str`"),
        ("defrag_threshold = 1.5", "serve.toml: defrag_threshold: Expected `float` <= 1"),
        ("blocks =", "serve.toml: this is no TOML"),
    ],
)
def test_what_cannot_be_meant_in_the_file_is_an_error_that_names_it(config, text, message):
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
def test_what_cannot_be_meant_on_the_command_line_is_an_error_that_names_it(name, value):
    with pytest.raises(InvalidArgumentError, match=f"^{name}: Expected"):
        read_settings(None, {name: value})


def test_a_file_that_is_not_there_is_an_error_that_says_so():
    with pytest.raises(InvalidArgumentError, match=r"nowhere.toml: can not read the settings: No such file"):
        read_settings("nowhere.toml", {})
