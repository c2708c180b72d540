"""kv_pool replaces all or none of a level's classes, depending on the environment and on vLLM's version.

Uses a fake vLLM: a few files in a folder, imported by a new interpreter.
"""

import json
import os
import subprocess
import sys
import textwrap
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import kv_pool
from kv_pool.errors import InvalidArgumentError
from kv_pool.integrations.vllm import register
from kv_pool.integrations.vllm.checked_versions import CHECKED_VERSIONS
from kv_pool.integrations.vllm.releases import find_release

CHECKED = ", ".join(CHECKED_VERSIONS["pool"])

# The parts of vLLM that the plugin uses.
FILES = {
    "vllm/__init__.py": "__version__ = '0.33.0'",
    "vllm/envs.py": "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES = True",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/kv_events.py": """
        class BlockStored: ...
        class BlockRemoved: ...
        class AllBlocksCleared: ...
    """,
    "vllm/v1/__init__.py": "",
    "vllm/v1/metrics/__init__.py": "",
    "vllm/v1/metrics/stats.py": """
        class KVCacheEvictionEvent: ...
        class PrefixCacheStats: ...
    """,
    "vllm/v1/core/__init__.py": "",
    "vllm/v1/core/block_pool.py": """
        from vllm.v1.core.kv_cache_utils import KVCacheBlock
        class BlockPool: ...
        class BlockHashToBlockMap: ...
    """,
    "vllm/v1/core/kv_cache_utils.py": """
        class KVCacheBlock: ...
        class FreeKVCacheBlockQueue: ...
        class KVCacheBlockCopy: ...
    """,
    "vllm/v1/core/kv_cache_metrics.py": """
        class KVCacheMetricsCollector: ...
        class BlockMetricsState: ...
    """,
    "vllm/v1/shared_pool.py": """
        from vllm.v1.core.block_pool import BlockPool
        class SharedPool(BlockPool):
            def __init__(self, *args, owner, **kwargs):
                self.owner = owner
                super().__init__(*args, **kwargs)
    """,
    "vllm/v1/scheduler.py": """
        from vllm.v1.core.block_pool import BlockPool as Pool
        from vllm.v1.core.kv_cache_utils import KVCacheBlock
        from vllm.v1.shared_pool import SharedPool
        import vllm.v1.core.kv_cache_metrics as metrics
    """,
    "vllm/v1/late.py": "from vllm.v1.core.block_pool import BlockPool",
    "vllm/v1/crowded.py": """
        from vllm.v1.core.block_pool import BlockPool
        class LookupPool(BlockPool): ...
        def make_pool(): ...
    """,
    # What level `manager` uses in addition.
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

# After `code` has run, prints the origin of each class in vLLM's modules, and the log.
REPORT = """
import json, logging, sys
logged = []
class Keep(logging.Handler):
    def emit(self, record):
        logged.append([record.levelname, record.getMessage()])
logging.getLogger("vllm").addHandler(Keep())
logging.getLogger("vllm").setLevel("DEBUG")
from kv_pool.integrations.vllm import register
{code}
import vllm.v1.late, vllm.v1.scheduler
seen = {{
    f"{{module.removeprefix('vllm.v1.')}}.{{name}}": thing.__module__.split(".")[0]
    for module in list(sys.modules) if module.startswith("vllm.v1.")
    for name, thing in vars(sys.modules[module]).items() if isinstance(thing, type)
}}
print(json.dumps([seen, logged]))
"""


@pytest.fixture
def made_up_vllm(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(content))
    return tmp_path


def run(folder, code, **environment):
    """Run `code` with the fake vLLM; return the origin of each class in its modules, and the log."""
    ours = Path(kv_pool.__file__).parent.parent
    told = subprocess.run(
        [sys.executable, "-c", REPORT.format(code=textwrap.dedent(code))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ours}", **environment},
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def is_ours(seen):
    """Return True if vLLM's modules see only kv_pool's classes, False if only vLLM's; fail on a mixture."""
    kept = ("SharedPool", "LookupPool", "SecondPool", "KVCacheEvictionEvent", "PrefixCacheStats", "Renamed")
    kept += ("KVCacheBlockCopy",)
    (owner,) = {owner for name, owner in seen.items() if not name.endswith(kept)}
    return owner == "kv_pool"


@pytest.mark.parametrize("environment", [{}, {"VLLM_PLUGINS": ""}, {"VLLM_PLUGINS": "other"}])
def test_nothing_happens_unless_vllm_plugins_names_kv_pool(made_up_vllm, environment, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    seen, logged = run(
        made_up_vllm, "register(); assert 'vllm.v1.core.block_pool' not in sys.modules", **environment
    )
    assert not is_ours(seen)
    assert [level for level, _ in logged] == ["DEBUG"]


@pytest.mark.parametrize(
    ("plugins", "way_out"),
    [
        ({}, "VLLM_PLUGINS is not set; set VLLM_PLUGINS=kv_pool"),
        ({"VLLM_PLUGINS": ""}, "VLLM_PLUGINS is not set; set VLLM_PLUGINS=kv_pool"),
        ({"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS is 'other'; set VLLM_PLUGINS=other,kv_pool"),
    ],
)
@pytest.mark.parametrize(
    ("code", "chosen"),
    [("register()", {"KV_POOL_VLLM": "manager"}), ("register('manager')", {"KV_POOL_VLLM": ""})],
)
def test_a_level_without_the_plugin_is_a_warning(made_up_vllm, monkeypatch, plugins, way_out, code, chosen):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    seen, logged = run(made_up_vllm, code, **plugins, **chosen)
    assert not is_ours(seen)
    assert [message for level, message in logged if level == "WARNING"] == [
        f"kv_pool is not used: KV_POOL_VLLM needs kv_pool's plugin, and {way_out}"
    ]


@pytest.mark.parametrize(
    ("variable", "value", "mistake"),
    [
        (
            "KV_POOL_VLLM_MAX_PINNED_BLOCKS",
            "8",
            "KV_POOL_VLLM_MAX_PINNED_BLOCKS has no effect at level pool; set KV_POOL_VLLM=manager",
        ),
        ("KV_POOL_VLLM_LIVE_CURVE", "yes", "KV_POOL_VLLM_LIVE_CURVE is 'yes'; it is one of 0, 1"),
        ("KV_POOL_VLLM_POLICI", "lru", "kv_pool has no variable KV_POOL_VLLM_POLICI; it has KV_POOL_VLLM, "),
    ],
)
def test_a_variable_without_effect_is_a_warning(made_up_vllm, variable, value, mistake):
    seen, logged = run(made_up_vllm, "register()", VLLM_PLUGINS="kv_pool", **{variable: value})
    assert is_ours(seen)
    assert [level for level, _ in logged] == ["WARNING", "INFO"]
    assert logged[0][1].startswith(f"kv_pool has a wrong setting: {mistake}")


def test_package_declares_register_as_its_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["vllm.general_plugins"]
    entry = EntryPoint("kv_pool", declared["kv_pool"], "vllm.general_plugins")
    assert entry.load() is register


def set_version(folder, version):
    (folder / "vllm/__init__.py").write_text(f"__version__ = {version!r}")


@pytest.mark.parametrize("version", ["0.34.0", "0.33.1", "0.33.0.post1", "0.33.0rc1", "0.29.0", "dev"])
def test_unchecked_version_keeps_its_classes(made_up_vllm, version):
    set_version(made_up_vllm, version)
    seen, logged = run(made_up_vllm, "register()", VLLM_PLUGINS="kv_pool")
    assert not is_ours(seen)
    assert logged == [
        [
            "WARNING",
            f"kv_pool is not used: this is vLLM {version}, and it was checked with {CHECKED}. "
            "Set KV_POOL_VLLM_FORCE=1 to use it anyway.",
        ]
    ]


@pytest.mark.parametrize("version", [*CHECKED_VERSIONS["pool"], "0.33.0+cpu"])
def test_each_checked_version_gets_the_pool_of_its_release(made_up_vllm, version):
    set_version(made_up_vllm, version)
    path = find_release(version).pool_class
    code = f"""
        import vllm.v1.scheduler
        register()
        from vllm.v1.scheduler import Pool, SharedPool
        assert f'{{Pool.__module__}}:{{Pool.__qualname__}}' == {path!r}
        import vllm.v1.shared_pool
        assert SharedPool is vllm.v1.shared_pool.SharedPool and issubclass(SharedPool, Pool)
        pool = SharedPool(8, True, 4, owner="me")
        assert (pool.owner, pool.get_num_free_blocks()) == ("me", 7)
        assert Pool(8, True, 4, True, None, medium="CPU").medium == "CPU"
    """
    seen, logged = run(made_up_vllm, code, VLLM_PLUGINS="kv_pool")
    assert is_ours(seen)
    level, message = logged[0]
    assert level == "INFO"
    assert message.startswith(f"kv_pool {kv_pool.__version__} (")
    assert f"replaces the block pool of vLLM {version}: 6 classes" in message


@pytest.mark.parametrize("version", CHECKED_VERSIONS["pool"])
def test_second_call_keeps_the_pool_with_a_control_socket(made_up_vllm, version):
    set_version(made_up_vllm, version)
    code = "register(); from vllm.v1.core import block_pool; first = block_pool.BlockPool; register()"
    code += "; assert block_pool.BlockPool is first"
    _, logged = run(made_up_vllm, code, VLLM_PLUGINS="kv_pool", KV_POOL_VLLM_CONTROL="1")
    assert len(logged) == 1


@pytest.mark.parametrize(("version", "used"), [("0.99.0", "0.33"), ("0.32.7", "0.32"), ("0.20.0", "0.30")])
def test_unchecked_version_can_be_forced(made_up_vllm, version, used):
    set_version(made_up_vllm, version)
    seen, logged = run(made_up_vllm, "register()", VLLM_PLUGINS="kv_pool", KV_POOL_VLLM_FORCE="1")
    assert is_ours(seen)
    assert [level for level, _ in logged] == ["WARNING", "INFO"]
    assert logged[0][1] == (
        f"kv_pool was checked with vLLM {CHECKED}; KV_POOL_VLLM_FORCE=1 forces it on {version}, with its "
        f"classes for {used}"
    )


def test_a_version_checked_at_level_pool_only_gets_that(made_up_vllm):
    set_version(made_up_vllm, "0.34.0")
    code = """
        from kv_pool.integrations.vllm.checked_versions import CHECKED_VERSIONS
        CHECKED_VERSIONS["pool"]["0.34.0"] = "2027-01-31"
        register()
    """
    seen, logged = run(made_up_vllm, code, VLLM_PLUGINS="kv_pool", KV_POOL_VLLM="manager")
    assert is_ours(seen)
    assert "kv_pool uses level pool: level manager was checked with vLLM 0.30.0, " in logged[0][1]
    assert "replaces the block pool of vLLM 0.34.0: 6 classes" in logged[1][1]


def test_forcing_a_version_with_missing_classes_changes_nothing(made_up_vllm):
    set_version(made_up_vllm, "0.99.0")
    (made_up_vllm / "vllm/v1/core/kv_cache_metrics.py").write_text("class Renamed: ...")
    seen, logged = run(made_up_vllm, "register()", VLLM_PLUGINS="kv_pool", KV_POOL_VLLM_FORCE="1")
    assert not is_ours(seen)
    assert logged[-1][0] == "WARNING"
    assert "has no attribute 'KVCacheMetricsCollector'" in logged[-1][1]


def test_subclass_in_a_module_with_other_names_is_an_obstacle(made_up_vllm):
    seen, logged = run(made_up_vllm, "import vllm.v1.crowded; register()", VLLM_PLUGINS="kv_pool")
    assert not is_ours(seen)
    ((level, message),) = logged
    assert level == "WARNING"
    assert "kv_pool is not used: vllm.v1.crowded.LookupPool derives from vLLM's class already" in message


def test_later_module_may_derive_from_the_new_classes(made_up_vllm):
    code = """
        register()
        from vllm.v1.crowded import LookupPool
        assert LookupPool(8, True, 4).get_num_free_blocks() == 7
    """
    run(made_up_vllm, code, VLLM_PLUGINS="kv_pool")


def test_pool_of_a_frozen_heap_is_an_obstacle(made_up_vllm):
    """vLLM freezes the heap of a process whose engine is complete."""
    code = """
        import gc
        from vllm.v1.scheduler import SharedPool
        old = SharedPool.__new__(SharedPool)
        old.owner = ["me"]
        gc.freeze()
        register()
        assert gc.get_freeze_count()
    """
    seen, logged = run(made_up_vllm, code, VLLM_PLUGINS="kv_pool")
    assert not is_ours(seen)
    ((_, message),) = logged
    assert "kv_pool is not used: a SharedPool exists already" in message


# Loaded before the plugin; its second run, which the plugin causes, fails half-way.
SECOND_SHARED = """
    import sys
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    if "ran" in globals():
        import vllm.v1.late
        added = True
        {failure}
    else:
        class SecondPool(BlockPool): ...
    ran = True
"""


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("raise KeyError('layer')", "(KeyError: 'layer')"),
        ("del SecondPool, BlockPool; BlockPool.x", "(NameError: name 'BlockPool' is not defined)"),
        ("pass", "(LookupError: it does not define SecondPool again)"),
    ],
)
def test_nothing_stays_replaced_if_a_reload_fails(made_up_vllm, failure, reason):
    module = textwrap.dedent(SECOND_SHARED.format(failure=failure))
    (made_up_vllm / "vllm/v1/second.py").write_text(module)
    code = """
        import vllm.v1.scheduler, vllm.v1.second
        from vllm.v1 import second, shared_pool
        from vllm.v1.second import SecondPool
        from vllm.v1.shared_pool import SharedPool
        files = [module for name, module in sys.modules.items() if name.startswith("vllm.v1.")]
        before = [dict(vars(module)) for module in files if not hasattr(module, "__path__")]
        register()
        assert before == [dict(vars(module)) for module in files if not hasattr(module, "__path__")]
        assert (second.SecondPool, shared_pool.SharedPool) == (SecondPool, SharedPool)
        assert "vllm.v1.late" in sys.modules
    """
    seen, logged = run(made_up_vllm, code, VLLM_PLUGINS="kv_pool")
    assert not is_ours(seen)
    assert logged == [
        [
            "WARNING",
            f"kv_pool is not used: vllm.v1.second cannot be run again with the new classes {reason}",
        ]
    ]


def test_a_failed_swap_may_be_repeated(made_up_vllm):
    module = textwrap.dedent(SECOND_SHARED.format(failure="if not hasattr(sys, 'repaired'): raise OSError"))
    module += "class SecondPool(BlockPool): ...\n"
    (made_up_vllm / "vllm/v1/second.py").write_text(module)
    code = """
        import vllm.v1.scheduler, vllm.v1.second
        register()
        sys.repaired = True
        register()
        from vllm.v1.second import SecondPool
        from vllm.v1.shared_pool import SharedPool
        from vllm.v1.scheduler import Pool
        assert issubclass(SecondPool, Pool) and issubclass(SharedPool, Pool)
    """
    seen, logged = run(made_up_vllm, code, VLLM_PLUGINS="kv_pool")
    assert is_ours(seen)
    assert [level for level, _ in logged] == ["WARNING", "INFO"]


# ---- levels ----------------------------------------------------------------------------------------


def owners(seen):
    """Return the package of the pool's class and of the manager's class, as vLLM's modules see them."""
    return seen["core.block_pool.BlockPool"], seen["manager_scheduler.KVCacheManager"]


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
    assert seen["manager_scheduler.KVCacheBlocks"] == "kv_pool"
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
