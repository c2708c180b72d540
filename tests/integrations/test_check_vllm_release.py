"""The entry that `check_vllm_release.py` writes."""

import pytest
from integrations.check_vllm_release import ENTRIES, add_entry


def read_entries(text):
    namespace = {}
    exec(text, namespace)
    return namespace["CHECKED_VERSIONS"]


@pytest.mark.parametrize("version", ["0.34.0", "0.33.1", "0.29.0", "0.100.0", "1.0.0.post1"])
def test_a_new_entry_is_in_the_order_of_versions(version):
    before = ENTRIES.read_text()
    after = read_entries(add_entry(before, "pool", version, "2027-01-31"))
    old = read_entries(before)
    assert after["pool"] == old["pool"] | {version: "2027-01-31"}
    numbers = [[int(part) for part in name.replace("post", "").split(".")] for name in after["pool"]]
    assert numbers == sorted(numbers)
    assert {level: after[level] for level in after if level != "pool"} == {
        level: old[level] for level in old if level != "pool"
    }


def test_a_listed_version_keeps_its_day():
    before = ENTRIES.read_text()
    assert add_entry(before, "pool", "0.33.0", "2027-01-31") == before


def test_an_unknown_level_is_an_error():
    with pytest.raises(ValueError, match="no level telepathy"):
        add_entry(ENTRIES.read_text(), "telepathy", "0.34.0", "2027-01-31")
