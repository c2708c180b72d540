from dataclasses import FrozenInstanceError

import pytest

from kv_pool.errors import InvalidArgumentError
from kv_pool.events.config import GroupSpec, PublisherConfig

TOML = """
[publisher]
endpoint = "tcp://*:5557"
replay_endpoint = "tcp://*:5558"
buffer_steps = 500
topic = "kv@pod@model"
heartbeat_s = 5
first_sequence = "clock"
groups = [{ kind = "full_attention" }, { kind = "sliding_window", sliding_window = 4096 }]

[engine.events]
data_parallel_rank = 3
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "kv.toml"
    path.write_text(TOML)
    return path


def test_only_this_machine_reaches_the_default():
    config = PublisherConfig()
    assert (config.endpoint, config.replay_endpoint) == ("tcp://127.0.0.1:5557", None)
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)


def test_a_config_does_not_change():
    with pytest.raises(FrozenInstanceError):
        PublisherConfig().topic = "t"


def test_a_file_says_it_all(path):
    assert PublisherConfig.from_toml(path) == PublisherConfig(
        endpoint="tcp://*:5557",
        replay_endpoint="tcp://*:5558",
        buffer_steps=500,
        topic="kv@pod@model",
        heartbeat_s=5.0,
        first_sequence="clock",
        groups=(GroupSpec(), GroupSpec(kind="sliding_window", sliding_window=4096)),
    )


def test_a_table_may_be_inside_another(path):
    assert PublisherConfig.from_toml(path, "engine.events").rank_endpoint == "tcp://127.0.0.1:5560"


@pytest.mark.parametrize(
    ("text", "table", "message"),
    [
        ("", "publisher", r"there is no table \[publisher\]"),
        ("[publisher]\n", "publisher.events", r"there is no table \[publisher.events\]"),
        ("publisher = 3\n", "publisher", "is a value, not a table"),
        ("publisher = \n", "publisher", "not TOML"),
        ("[publisher]\nhwm = 0\n", "publisher", "hwm is 0; it is an integer, 1 or more"),
    ],
)
def test_a_file_that_cannot_be_meant_is_told_by_name(tmp_path, text, table, message):
    path = tmp_path / "kv.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        PublisherConfig.from_toml(path, table)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("values", [{"bufer_steps": 3}, {"groups": [{"bufer_steps": 3}]}])
def test_an_unknown_key_is_told_with_the_known_ones(values):
    with pytest.raises(InvalidArgumentError, match=r"unknown '.*bufer_steps'.* known are .*buffer_steps"):
        PublisherConfig.from_mapping(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hwm": "many"}, "hwm"),
        ({"hwm": True}, "hwm"),
        ({"hwm": 0}, "hwm is 0"),
        ({"buffer_steps": 0}, "buffer_steps is 0"),
        ({"max_queue_size": -1}, "max_queue_size is -1"),
        ({"data_parallel_rank": -1}, "data_parallel_rank is -1"),
        ({"when_full": "block"}, "when_full"),
        ({"first_sequence": "one"}, "first_sequence"),
        ({"first_sequence": -1}, "first_sequence"),
        ({"first_sequence": True}, "first_sequence"),
        ({"heartbeat_s": 0}, "heartbeat_s is 0"),
        ({"linger_s": -1}, "linger_s is -1"),
        ({"linger_s": float("inf")}, "linger_s is inf"),
        ({"endpoint": "5557"}, "write tcp://host:port"),
        ({"replay_endpoint": "5557"}, "write tcp://host:port"),
        ({"replay_endpoint": "tcp://127.0.0.1:5557"}, "they are two sockets"),
        ({"endpoint": "tcp://*:65535", "data_parallel_rank": 1}, "65536"),
        ({"endpoint": "ipc:///tmp/e", "data_parallel_rank": 1}, "no room"),
        ({"groups": [{"kind": "half_attention"}]}, "half_attention.* one of full_attention"),
        ({"groups": [{"sliding_window": 0}]}, "sliding_window is 0"),
        ({"groups": 3}, "groups"),
        ({"groups": [3]}, "groups"),
        ({"curve_client_keys_dir": "keys"}, "curve_secret_key_file is not"),
        ({"curve_secret_key_file": "key", "endpoint": "inproc://e"}, "CURVE is for tcp and ipc"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_meant_is_told(values, message):
    with pytest.raises(InvalidArgumentError, match=message):
        PublisherConfig.from_mapping(values)


def test_the_constructor_checks_what_a_file_is_checked_for():
    for wrong in ({"hwm": "many"}, {"when_full": "block"}, {"hwm": 1.0}):
        with pytest.raises(InvalidArgumentError):
            PublisherConfig(**wrong)


def test_free_ports_may_be_the_same():
    config = PublisherConfig(
        endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", data_parallel_rank=4
    )
    assert config.rank_endpoint == config.rank_replay_endpoint == "tcp://127.0.0.1:0"


def test_the_preset_for_routers_has_what_they_need_and_room_for_ranks():
    config = PublisherConfig.for_routers()
    assert (config.first_sequence, config.heartbeat_s, config.topic) == ("clock", 1.0, "")
    ports = {
        rank_endpoint.rsplit(":", 1)[1]
        for rank in range(100)
        for one in (PublisherConfig.for_routers(data_parallel_rank=rank),)
        for rank_endpoint in (one.rank_endpoint, one.rank_replay_endpoint)
    }
    assert len(ports) == 200


def test_settings_win_over_the_preset_for_routers():
    config = PublisherConfig.for_routers(replay_endpoint=None, first_sequence="zero", topic="t")
    assert (config.replay_endpoint, config.first_sequence, config.topic) == (None, "zero", "t")
    with pytest.raises(InvalidArgumentError, match="slow_reader_s"):
        PublisherConfig.for_routers(slow_reader_s=0.0)
