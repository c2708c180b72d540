"""Each version of vLLM gets its own classes, and all checked versions are described."""

import pytest

from kv_pool.integrations.vllm.releases import RULES, find_release, is_checked


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("0.33.0", (0, 33)),
        ("0.33.0+cpu", (0, 33)),
        ("0.32.0", (0, 32)),
        ("0.31.4rc2", (0, 31)),
        ("0.30", (0, 30)),
        ("0.34.0", (0, 33)),
        ("1.0.0", (0, 33)),
        ("0.29.1", (0, 30)),
        ("dev", (0, 33)),
        ("", (0, 33)),
    ],
)
def test_a_version_gets_the_newest_release_that_is_not_newer(version, number):
    assert find_release(version) == number


def test_releases_are_listed_newest_first():
    assert list(RULES) == sorted(RULES, reverse=True)


def test_only_whole_versions_are_checked():
    assert is_checked("pool", "0.33.0")
    assert is_checked("pool", "0.33.0+cpu")
    assert not is_checked("pool", "0.33")
    assert not is_checked("pool", "0.33.0rc1")
    assert not is_checked("telepathy", "0.33.0")
