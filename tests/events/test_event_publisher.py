import pytest

from kv_pool.errors import InvalidArgumentError
from kv_pool.events.event_publisher import GroupSpec, PublisherConfig

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


def test_file_can_set_every_field(path):
    assert PublisherConfig.from_toml(path) == PublisherConfig(
        endpoint="tcp://*:5557",
        replay_endpoint="tcp://*:5558",
        buffer_steps=500,
        topic="kv@pod@model",
        heartbeat_s=5.0,
        first_sequence="clock",
        groups=(GroupSpec(), GroupSpec(kind="sliding_window", sliding_window=4096)),
    )


def test_table_may_be_nested(path):
    assert PublisherConfig.from_toml(path, "engine.events").rank_endpoint == "tcp://127.0.0.1:5560"


@pytest.mark.parametrize(
    ("text", "table", "message"),
    [
        ("", "publisher", r"there is no table \[publisher\]"),
        ("[publisher]\n", "publisher.events", r"there is no table \[publisher.events\]"),
        ("publisher = 3\n", "publisher", "is a value, not a table"),
        ("publisher = \n", "publisher", "not TOML"),
        ("[publisher]\nhwm = 0\n", "publisher", "hwm is 0; it must be an integer, 1 or more"),
    ],
)
def test_error_for_invalid_file_names_the_file(tmp_path, text, table, message):
    path = tmp_path / "kv.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        PublisherConfig.from_toml(path, table)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("values", [{"bufer_steps": 3}, {"groups": [{"bufer_steps": 3}]}])
def test_error_for_unknown_key_lists_known_keys(values):
    with pytest.raises(InvalidArgumentError, match=r"unknown field `bufer_steps`.* known are .*buffer_steps"):
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
        ({"slow_reader_s": 0.0}, "slow_reader_s is 0.0"),
        ({"linger_s": -1}, "linger_s is -1"),
        ({"linger_s": float("inf")}, "linger_s is inf"),
        ({"endpoint": "5557"}, "write tcp://host:port"),
        ({"replay_endpoint": "5557"}, "write tcp://host:port"),
        ({"replay_endpoint": "tcp://127.0.0.1:5557"}, "they must differ"),
        ({"endpoint": "tcp://*:65535", "data_parallel_rank": 1}, "65536"),
        ({"endpoint": "ipc:///tmp/e", "data_parallel_rank": 1}, "cannot be offset"),
        ({"groups": [{"kind": "half_attention"}]}, "half_attention.* one of full_attention"),
        ({"groups": [{"sliding_window": 0}]}, "sliding_window is 0"),
        ({"groups": 3}, "groups"),
        ({"groups": [3]}, "groups"),
        ({"curve_client_keys_dir": "keys"}, "curve_secret_key_file is not"),
        ({"curve_secret_key_file": "key", "endpoint": "inproc://e"}, "CURVE is for tcp and ipc"),
    ],
    ids=str,
)
def test_invalid_value_is_rejected_with_a_message(values, message):
    with pytest.raises(InvalidArgumentError, match=message):
        PublisherConfig.from_mapping(values)


def test_constructor_checks_the_same_as_a_file():
    for wrong in ({"hwm": "many"}, {"when_full": "block"}, {"hwm": 1.0}):
        with pytest.raises(InvalidArgumentError):
            PublisherConfig(**wrong)


def test_both_endpoints_may_have_a_wildcard_port():
    config = PublisherConfig(
        endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", data_parallel_rank=4
    )
    assert config.rank_endpoint == config.rank_replay_endpoint == "tcp://127.0.0.1:0"


def test_router_preset_has_required_settings_and_ports_for_ranks():
    config = PublisherConfig.for_routers()
    assert (config.first_sequence, config.heartbeat_s, config.topic) == ("clock", 1.0, "")
    ports = {
        rank_endpoint.rsplit(":", 1)[1]
        for rank in range(100)
        for one in (PublisherConfig.for_routers(data_parallel_rank=rank),)
        for rank_endpoint in (one.rank_endpoint, one.rank_replay_endpoint)
    }
    assert len(ports) == 200
