"""The levels of the vLLM plugin: which classes each replaces, and that an unusable level replaces none.

Uses the fake vLLM of `test_vllm_plugin`, with the modules that level `manager` imports.
"""

import textwrap

import pytest
from integrations.test_vllm_plugin import FILES, is_ours, run, set_version

from kv_pool.errors import InvalidArgumentError
from kv_pool.integrations.vllm import register
from kv_pool.integrations.vllm.checked_versions import CHECKED_VERSIONS
from kv_pool.integrations.vllm.releases import find_release

MANAGER_FILES = {
    "vllm/v1/metrics/stats.py": """
        class KVCacheEvictionEvent: ...
        class PrefixCacheStats: ...
    """,
    "vllm/v1/request.py": "class RequestStatus: WAITING, PREEMPTED = 1, 2",
    "vllm/v1/kv_cache_interface.py": """
        class AttentionSpec: ...
        class CircularBufferSpec: ...
        class CrossAttentionSpec: ...
        def get_kv_cache_spec_kind(spec): ...
        def get_kv_cache_spec_sliding_window(spec): ...
    """,
    "vllm/v1/kv_cache_spec_registry.py": """
        class KVCacheSpecRegistry:
            def get_manager_class(spec, role): return None
    """,
    "vllm/v1/core/kv_cache_utils.py": """
        class KVCacheBlock: ...
        class FreeKVCacheBlockQueue: ...
        class KVCacheBlockCopy: ...
    """,
    "vllm/v1/core/single_type_kv_cache_manager.py": """
        class ChunkedLocalAttentionManager: ...
        class CrossAttentionManager: ...
        class FullAttentionManager: ...
        class MambaManager: ...
        class SlidingWindowManager: ...
    """,
    "vllm/v1/core/kv_cache_coordinator.py": """
        from abc import ABC
        class HybridKVCacheCoordinator(ABC): ...
    """,
    "vllm/v1/core/kv_cache_manager.py": """
        from vllm.v1.core.block_pool import BlockPool
        class KVCacheBlocks: ...
        class KVCacheManager:
            def __init__(self, config, **options):
                self.block_pool = BlockPool(8, True, 4)
    """,
    "vllm/v1/manager_scheduler.py": "from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager",
}
LEVEL = {"VLLM_PLUGINS": "kv_pool", "KV_POOL_VLLM": "manager"}
REPORTED = "import vllm.v1.manager_scheduler"
POOL_NAMES = {"BlockPool", "BlockHashToBlockMap", "KVCacheBlock", "FreeKVCacheBlockQueue"}


@pytest.fixture
def made_up_vllm(tmp_path):
    for name, content in {**FILES, **MANAGER_FILES}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(content))
    return tmp_path


def owners(seen):
    """Return the package of the pool's class and of the manager's class, as vLLM's modules see them."""
    return seen["core.block_pool.BlockPool"], seen["manager_scheduler.KVCacheManager"]


def test_level_manager_replaces_pool_and_manager(made_up_vllm):
    seen, logged = run(made_up_vllm, f"{REPORTED}; register()", **LEVEL)
    assert owners(seen) == ("kv_pool", "kv_pool")
    assert seen["manager_scheduler.KVCacheBlocks"] == "kv_pool"
    ((level, message),) = logged
    assert level == "INFO"
    assert "replaces the block pool and KV cache manager of vLLM 0.33.0: 8 classes" in message


@pytest.mark.parametrize("version", CHECKED_VERSIONS["manager"])
def test_each_version_gets_the_manager_of_its_release(made_up_vllm, version):
    set_version(made_up_vllm, version)
    release = find_release(version)
    code = f"""
        {REPORTED}
        register()
        from vllm.v1.manager_scheduler import KVCacheManager
        for found, path in (
            (KVCacheManager, {release.manager_class!r}), (KVCacheManager.pool_class, {release.pool_class!r})
        ):
            assert f"{{found.__module__}}:{{found.__qualname__}}" == path
    """
    seen, logged = run(made_up_vllm, code, **LEVEL)
    assert owners(seen) == ("kv_pool", "kv_pool")
    assert f"manager of vLLM {version}: 8 classes" in logged[-1][1]


def test_level_pool_keeps_the_manager_of_vllm(made_up_vllm):
    code = f"{REPORTED}; register()"
    for environment in ({}, {"KV_POOL_VLLM": "pool"}, {"KV_POOL_VLLM": ""}):
        seen, _ = run(made_up_vllm, code, VLLM_PLUGINS="kv_pool", **environment)
        assert owners(seen) == ("kv_pool", "vllm")


def test_level_from_python_reaches_later_processes(made_up_vllm):
    code = f"{REPORTED}; register('manager'); import os; assert os.environ['KV_POOL_VLLM'] == 'manager'"
    seen, _ = run(made_up_vllm, code, VLLM_PLUGINS="kv_pool")
    assert owners(seen) == ("kv_pool", "kv_pool")


def test_level_manager_can_follow_level_pool(made_up_vllm):
    seen, logged = run(made_up_vllm, f"{REPORTED}; register(); register('manager')", VLLM_PLUGINS="kv_pool")
    assert owners(seen) == ("kv_pool", "kv_pool")
    assert [level for level, _ in logged] == ["INFO", "INFO"]


def test_unknown_level_in_the_environment_changes_nothing(made_up_vllm):
    seen, logged = run(made_up_vllm, f"{REPORTED}; register()", **{**LEVEL, "KV_POOL_VLLM": "all"})
    assert owners(seen) == ("vllm", "vllm")
    assert logged == [["WARNING", "kv_pool is not used: KV_POOL_VLLM is 'all'; it is one of pool, manager"]]


def test_unknown_level_from_python_is_an_error(monkeypatch):
    monkeypatch.delenv("KV_POOL_VLLM", raising=False)
    with pytest.raises(InvalidArgumentError, match="level is 'all'; it is one of pool, manager"):
        register("all")


def test_release_without_the_manager_changes_nothing(made_up_vllm):
    (made_up_vllm / "vllm/v1/core/kv_cache_coordinator.py").write_text("class Renamed: ...")
    set_version(made_up_vllm, "0.99.0")
    seen, logged = run(made_up_vllm, f"{REPORTED}; register()", **LEVEL, KV_POOL_VLLM_FORCE="1")
    assert owners(seen) == ("vllm", "vllm")
    assert logged[-1][0] == "WARNING"
    assert "HybridKVCacheCoordinator" in logged[-1][1]


def test_existing_manager_is_an_obstacle(made_up_vllm):
    code = """
        import vllm.v1.manager_scheduler as scheduler
        old = scheduler.KVCacheManager.__new__(scheduler.KVCacheManager)
        register()
    """
    seen, logged = run(made_up_vllm, code, **LEVEL)
    assert owners(seen) == ("vllm", "vllm")
    assert "kv_pool is not used: a KVCacheManager exists already" in logged[0][1]


def test_configuration_that_is_not_served_gets_level_pool(made_up_vllm):
    """The spec registry of the fake vLLM knows no class for the group, so vLLM's own manager is created."""
    code = f"""
        {REPORTED}
        register()
        from types import SimpleNamespace
        from vllm.v1.manager_scheduler import KVCacheManager
        group = SimpleNamespace(kv_cache_spec=object(), role=None)
        made = KVCacheManager(SimpleNamespace(kv_cache_groups=[group]), max_model_len=8,
                              scheduler_block_size=4, hash_block_size=4)
        assert type(made).__module__ == "vllm.v1.core.kv_cache_manager", type(made)
        assert type(made.block_pool).__module__.startswith("kv_pool")
    """
    _, logged = run(made_up_vllm, code, **LEVEL)
    (message,) = [message for level, message in logged if level == "WARNING"]
    assert message == (
        "kv_pool does not serve a KV cache group of object, which vLLM serves by nothing at level manager: "
        "vLLM's manager runs on kv_pool's block pool"
    )


@pytest.mark.parametrize("error", ["TypeError", "RuntimeError", "KeyError"])
def test_a_manager_module_that_fails_changes_nothing(made_up_vllm, error):
    """vLLM's registry raises while the manager's module is imported."""
    (made_up_vllm / "vllm/v1/kv_cache_spec_registry.py").write_text(f"raise {error}('registry')")
    seen, logged = run(made_up_vllm, f"{REPORTED}; register()", **LEVEL)
    assert owners(seen) == ("vllm", "vllm")
    ((level, message),) = logged
    assert level == "WARNING"
    assert message.startswith(
        f"kv_pool is not used: its classes cannot be loaded with vLLM 0.33.0 ({error}: "
    )


def test_a_manager_that_comes_too_late_leaves_level_pool(made_up_vllm):
    """A manager over kv_pool's pool exists when the level is raised."""
    code = f"""
        {REPORTED}
        register()
        import vllm.v1.manager_scheduler as scheduler
        old = scheduler.KVCacheManager(None)
        register("manager")
    """
    seen, logged = run(made_up_vllm, code, VLLM_PLUGINS="kv_pool")
    assert owners(seen) == ("kv_pool", "vllm")
    assert logged[2:] == [
        [
            "WARNING",
            "kv_pool stays at level pool: a KVCacheManager exists already. Register it before an engine is "
            "created.",
        ]
    ]


def test_level_manager_is_not_lowered(made_up_vllm):
    seen, logged = run(made_up_vllm, f"{REPORTED}; register(); register('pool')", **LEVEL)
    assert owners(seen) == ("kv_pool", "kv_pool")
    assert logged[1:] == [
        [
            "WARNING",
            "kv_pool stays at level manager: a level cannot be lowered. Later processes use level pool",
        ]
    ]


def test_all_or_nothing_of_level_manager_if_a_reload_fails(made_up_vllm):
    (made_up_vllm / "vllm/v1/derived_manager.py").write_text(
        textwrap.dedent(
            """
            from vllm.v1.core.kv_cache_manager import KVCacheManager
            if KVCacheManager.__module__.startswith("kv_pool"):
                raise RuntimeError("this manager is final")
            class DerivedManager(KVCacheManager): ...
            """
        )
    )
    code = f"{REPORTED}; import vllm.v1.derived_manager; register()"
    seen, logged = run(made_up_vllm, code, **LEVEL)
    assert owners(seen) == ("vllm", "vllm")
    assert (
        is_ours({name: owner for name, owner in seen.items() if name.split(".")[-1] in POOL_NAMES}) is False
    )
    ((_, message),) = logged
    assert "vllm.v1.derived_manager cannot be run again" in message
    assert "this manager is final" in message
