"""Cache policies are found by name, in modules, in files, and as classes."""

import sys

import pytest
from core.policy_pool import make_manager, run

from kv_pool import BlockPool, InvalidArgumentError, InvalidTypeError
from kv_pool.core.cache_policy import LRU, CachePolicy
from kv_pool.core.policy_names import find_policy, list_policies

MINE = """
from kv_pool.core.cache_policy import CachePolicy

class Mine(CachePolicy):
    num_queues = 2

    def freed(self, run):
        return 1

    def choose(self):
        return 1

other = 3
"""


def test_all_policies_of_the_package_are_found():
    assert {"s3fifo", "sieve", "arc", "slru", "gdsf", "lfu", "twoq", "lirs", "wtinylfu"} <= set(
        list_policies()
    )
    for name in ["lru", *list_policies()]:
        choice = find_policy(name)
        assert choice.name == name
        assert isinstance(choice.make(), CachePolicy)
        assert not choice.is_flat
        assert find_policy(f"flat:{name}").is_flat


def test_a_file_has_a_policy(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    manager = make_manager(4, f"{tmp_path}/mine.py:Mine")
    run(manager, "a", range(16))
    run(manager, "b", range(50, 66))
    policy = manager.block_pool.policy_host.policy
    assert (type(policy).__name__, policy.queues[1].num_blocks) == ("Mine", 4)


def test_an_entry_point_has_a_policy(tmp_path, monkeypatch):
    (tmp_path / "my_policies.py").write_text(MINE)
    (tmp_path / "mine-1.0.dist-info").mkdir()
    (tmp_path / "mine-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n"
    )
    (tmp_path / "mine-1.0.dist-info" / "entry_points.txt").write_text(
        "[kv_pool.policies]\ntheirs = my_policies:Mine\nbroken = my_policies:absent\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    choice = find_policy("theirs")
    assert (choice.name, choice.make().__class__.__name__) == ("theirs", "Mine")
    assert find_policy("flat:theirs").is_flat
    with pytest.raises(InvalidArgumentError, match=r"my_policies:absent raised AttributeError"):
        find_policy("broken")
    monkeypatch.delitem(sys.modules, "my_policies")


def test_a_class_or_a_function_is_a_policy():
    assert find_policy(LRU) == ("LRU", LRU, False)
    assert find_policy(find_policy("flat:lru")).is_flat
    pool = BlockPool(4, True, 4, policy=lambda: LRU())
    assert isinstance(pool.policy_host.policy, LRU)


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        ("nothing", r"no cache policy 'nothing': known are lru, arc, .*module:Class and file.py:Class"),
        ("nothing.at.all:Mine", "importing nothing.at.all raised ModuleNotFoundError"),
        ("no_file.py:Mine", r"there is no file no_file.py"),
        ("kv_pool.core.cache_policy:RunQueue", "RunQueue is not a class derived from"),
        ("flat:", "no cache policy ''"),
    ],
)
def test_a_policy_that_is_not_there_is_refused(policy, match):
    with pytest.raises(InvalidArgumentError, match=match):
        find_policy(policy)


def test_a_policy_of_another_type_is_refused():
    with pytest.raises(InvalidTypeError, match="policy is of type int; expected a name"):
        find_policy(3)
