"""The settings of the connector."""

import re

import pytest

from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.integrations.vllm.connector.settings import ConnectorSettings, count_blocks, parse_bytes


def test_no_settings_mean_no_tiers():
    assert ConnectorSettings.parse({}) == ConnectorSettings(0, 0, "", "", 300.0)


def test_sizes_are_numbers_or_text():
    parsed = ConnectorSettings.parse(
        {"host_bytes": "1.5GiB", "disk_bytes": 1000, "disk_folder": "/blocks", "weights": "v2"}
    )
    assert (parsed.host_bytes, parsed.disk_bytes) == (1_610_612_736, 1000)
    assert (parsed.disk_folder, parsed.weights) == ("/blocks", "v2")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"host_byte": 1}, "unknown keys host_byte; KVPoolConnector takes host_bytes, disk_bytes"),
        ({"host_bytes": -1}, "host_bytes is -1; it is a count, 0 or more"),
        ({"host_bytes": "many"}, "host_bytes: 'many' is not a size; write it as 40GiB"),
        ({"disk_bytes": 5}, "disk_bytes is 5 and disk_folder is ''; give both or neither"),
        ({"disk_folder": "a"}, "disk_bytes is 0 and disk_folder is 'a'; give both or neither"),
        ({"disk_bytes": 5, "disk_folder": "a"}, "disk_bytes is given without host_bytes"),
        ({"lease_s": 0}, "lease_s is 0"),
    ],
)
def test_wrong_settings_are_refused(config, message):
    with pytest.raises(InvalidArgumentError, match=message):
        ConnectorSettings.parse(config)


@pytest.mark.parametrize("value", [16.0, True, None, [1]])
def test_settings_of_a_wrong_type_are_refused(value):
    expected = re.escape(f"host_bytes is {value!r}, of type {type(value).__name__}; expected int or str")
    with pytest.raises(InvalidTypeError, match=expected):
        ConnectorSettings.parse({"host_bytes": value})
    with pytest.raises(InvalidTypeError):
        ConnectorSettings.parse({"weights": 3})


def test_units_of_sizes():
    units = ("KiB", "MiB", "GiB", "TiB")
    assert [parse_bytes("n", f"2 {unit}") for unit in units] == [2**11, 2**21, 2**31, 2**41]
    assert parse_bytes("n", "17") == 17
    assert parse_bytes("n", "2 GB") == 2_000_000_000


def test_bytes_are_shared_by_the_ranks():
    assert count_blocks("host_bytes", 1000, 2, 100) == 5
    with pytest.raises(InvalidArgumentError, match="give at least 200"):
        count_blocks("host_bytes", 199, 2, 100)
