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
from kv_pool.integrations.vllm import register, releases
from kv_pool.integrations.vllm.releases import CHECKED_VERSIONS, find_release

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
    "vllm/v1/metrics/loggers.py": """
        class PrometheusStatLogger:
            def __init__(self, vllm_config, engine_indexes=None): ...
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
    "vllm/v1/core/sched/__init__.py": "",
    "vllm/v1/core/sched/scheduler.py": """
        from types import SimpleNamespace
        from vllm.v1.core.block_pool import BlockPool
        class Scheduler:
            def __init__(self, vllm_config):
                self.kv_cache_manager = SimpleNamespace(block_pool=BlockPool(8, True, 4))
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
NAMED = {"VLLM_PLUGINS": "kv_pool"}
LEVEL = NAMED | {"KV_POOL_VLLM": "manager"}
FORCED = {"KV_POOL_VLLM_FORCE": "1"}
MANAGER_NAMES = ("KVCacheManager", "KVCacheBlocks")
REPLACED = ("Pool", *[name for names in releases.REPLACED["manager"].values() for name in names])

# After `code` has run, prints the origin of each class in vLLM's modules, and the log.
REPORT = """
import json, logging, sys
logged = []
class Keep(logging.Handler):
    def emit(self, record):
        logged.append([record.levelname, record.getMessage()])
logging.getLogger("vllm").addHandler(Keep())
logging.getLogger("vllm").setLevel("DEBUG")
from kv_pool.integrations.vllm import register, releases
{code}
import vllm.v1.late, vllm.v1.scheduler, vllm.v1.manager_scheduler
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


def run(folder, code, *, version="0.33.0", **environment):
    """Run `code` with the fake vLLM; return the level that its modules see, and the log.

    The level is None if all modules see vLLM's classes; a mixture fails.
    """
    (folder / "vllm/__init__.py").write_text(f"__version__ = {version!r}")
    ours = Path(kv_pool.__file__).parent.parent
    told = subprocess.run(
        [sys.executable, "-c", REPORT.format(code=textwrap.dedent(code))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ours}", **environment},
    )
    assert told.returncode == 0, told.stderr
    seen, logged = json.loads(told.stdout)
    owners = {name: {owner for path, owner in seen.items() if path.endswith(f".{name}")} for name in REPLACED}
    (pool,) = set().union(*[owners[name] for name in REPLACED if name not in MANAGER_NAMES])
    (manager,) = set().union(*[owners[name] for name in MANAGER_NAMES])
    return {("vllm", "vllm"): None, ("kv_pool", "vllm"): "pool", ("kv_pool", "kv_pool"): "manager"}[
        pool, manager
    ], logged


def case(name, level, *warnings, code="register()", version="0.33.0", files=None, **environment):
    """Return what runs, the level afterwards, and a part of each warning."""
    return pytest.param(level, warnings, code, version, files or {}, environment, id=name)


IS_LATE = "Register it before an engine is created."
NO_PLUGIN = "kv_pool is not used: KV_POOL_VLLM needs kv_pool's plugin, and VLLM_PLUGINS is "
NOT_LOADED = "assert 'vllm.v1.core.block_pool' not in sys.modules"
CASES = [
    # ---- the plugin is not named
    case("no variables", None, code=f"register(); {NOT_LOADED}"),
    case("another plugin", None, code=f"register(); {NOT_LOADED}", VLLM_PLUGINS="other"),
    case("a level only", None, NO_PLUGIN + "not set; set VLLM_PLUGINS=kv_pool", KV_POOL_VLLM="manager"),
    case(
        "a level from Python, another plugin",
        None,
        NO_PLUGIN + "'other'; set VLLM_PLUGINS=other,kv_pool",
        code="register('manager')",
        VLLM_PLUGINS="other",
    ),
    # ---- a variable without effect
    case(
        "pins at level pool",
        "pool",
        "kv_pool has a wrong setting: KV_POOL_VLLM_MAX_PINNED_BLOCKS has no effect at level pool",
        **NAMED,
        KV_POOL_VLLM_MAX_PINNED_BLOCKS="8",
    ),
    # ---- versions
    *[
        case(
            f"unchecked {version}",
            None,
            f"kv_pool is not used: this is vLLM {version}, and it was checked with {CHECKED}. "
            "Set KV_POOL_VLLM_FORCE=1 to use it anyway.",
            version=version,
            **NAMED,
        )
        for version in ("0.34.0", "0.33.1", "0.33.0.post1", "0.33.0rc1", "0.29.0", "dev")
    ],
    *[
        case(
            f"forced {version}",
            "pool",
            f"kv_pool was checked with vLLM {CHECKED}; KV_POOL_VLLM_FORCE=1 forces it on {version}, with its "
            f"classes for {used}",
            version=version,
            **NAMED,
            **FORCED,
        )
        for version, used in (("0.99.0", "0.33"), ("0.32.7", "0.32"), ("0.20.0", "0.30"))
    ],
    case(
        "checked at level pool only",
        "pool",
        "kv_pool uses level pool: level manager was checked with vLLM 0.30.0, ",
        code="""
            from kv_pool.integrations.vllm.releases import CHECKED_VERSIONS
            CHECKED_VERSIONS["pool"]["0.34.0"] = "2027-01-31"
            register()
        """,
        version="0.34.0",
        **LEVEL,
    ),
    case(
        "forced, without a class of the pool",
        None,
        "forces it on 0.99.0",
        "has no attribute 'KVCacheMetricsCollector'",
        version="0.99.0",
        files={"kv_cache_metrics": "class Renamed: ..."},
        **NAMED,
        **FORCED,
    ),
    case(
        "forced, without a class of the manager",
        None,
        "forces it on 0.99.0",
        "HybridKVCacheCoordinator",
        version="0.99.0",
        files={"kv_cache_coordinator": "class Renamed: ..."},
        **LEVEL,
        **FORCED,
    ),
    case(
        "a module raises an error",  # as vLLM's registry does while the manager's module is imported
        None,
        "kv_pool is not used: its classes cannot be loaded with vLLM 0.33.0 (TypeError: registry)",
        files={"../kv_cache_spec_registry": "raise TypeError('registry')"},
        **LEVEL,
    ),
    # ---- too late
    case(
        "a subclass in a module with other names",
        None,
        "kv_pool is not used: vllm.v1.crowded.LookupPool derives from vLLM's class already",
        code="import vllm.v1.crowded; register()",
        **NAMED,
    ),
    case(
        "a later module derives from the new class",
        "pool",
        code="""
            register()
            from vllm.v1.crowded import LookupPool
            assert LookupPool(8, True, 4).get_num_free_blocks() == 7
        """,
        **NAMED,
    ),
    case(
        "a pool of a frozen heap",  # vLLM freezes the heap of a process whose engine is complete
        None,
        f"kv_pool is not used: a SharedPool exists already. {IS_LATE}",
        code="""
            import gc
            from vllm.v1.scheduler import SharedPool
            old = SharedPool.__new__(SharedPool)
            old.owner = ["me"]
            gc.freeze()
            register()
            assert gc.get_freeze_count()
        """,
        **NAMED,
    ),
    case(
        "a manager over kv_pool's pool",
        "pool",
        f"kv_pool stays at level pool: a KVCacheManager exists already. {IS_LATE}",
        code="""
            import vllm.v1.manager_scheduler as scheduler
            register()
            old = scheduler.KVCacheManager(None)
            register("manager")
        """,
        **NAMED,
    ),
    # ---- levels
    *[case(f"level {level!r}", "pool", **NAMED, KV_POOL_VLLM=level) for level in ("pool", "")],
    case(
        "level from Python, for later processes, too",
        "manager",
        code="register('manager'); import os; assert os.environ['KV_POOL_VLLM'] == 'manager'",
        **NAMED,
    ),
    case("level raised", "manager", code="register(); register('manager')", **NAMED),
    case(
        "level lowered",
        "manager",
        "kv_pool stays at level manager: a level cannot be lowered. Later processes use level pool",
        code="register(); register('pool')",
        **LEVEL,
    ),
    case(
        "unknown level",
        None,
        "kv_pool is not used: KV_POOL_VLLM is 'all'; it is one of pool, manager",
        **NAMED,
        KV_POOL_VLLM="all",
    ),
    case(
        "a configuration that is not served",  # the fake registry knows no class for the group
        "manager",
        "kv_pool does not serve a KV cache group of object, which vLLM serves by nothing at level manager: "
        "vLLM's manager runs on kv_pool's block pool",
        code="""
            register()
            from types import SimpleNamespace
            from vllm.v1.manager_scheduler import KVCacheManager
            group = SimpleNamespace(kv_cache_spec=object(), role=None)
            made = KVCacheManager(SimpleNamespace(kv_cache_groups=[group]), max_model_len=8,
                                  scheduler_block_size=4, hash_block_size=4)
            assert type(made).__module__ == "vllm.v1.core.kv_cache_manager", type(made)
            assert type(made.block_pool).__module__.startswith("kv_pool")
        """,
        **LEVEL,
    ),
]


@pytest.mark.parametrize(("level", "warnings", "code", "version", "files", "environment"), CASES)
def test_all_classes_are_replaced_or_a_warning_says_why(
    made_up_vllm, monkeypatch, level, warnings, code, version, files, environment
):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    for name, content in files.items():
        (made_up_vllm / f"vllm/v1/core/{name}.py").write_text(content)
    found, logged = run(made_up_vllm, code, version=version, **environment)
    assert found == level
    told = [message for kind, message in logged if kind == "WARNING"]
    assert len(told) == len(warnings)
    for part, message in zip(warnings, told, strict=True):
        assert part in message
    replaced = [message for kind, message in logged if kind == "INFO" and " replaces the " in message]
    assert bool(replaced) == (level is not None)
    what = "block pool and KV cache manager" if level == "manager" else "block pool"
    assert all(f" replaces the {what} of vLLM {version}: " in message for message in replaced[-1:])


def test_unknown_level_from_python_is_an_error(monkeypatch):
    monkeypatch.delenv("KV_POOL_VLLM", raising=False)
    with pytest.raises(InvalidArgumentError, match="level is 'all'; it is one of pool, manager"):
        register("all")


def test_package_declares_register_as_its_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["vllm.general_plugins"]
    entry = EntryPoint("kv_pool", declared["kv_pool"], "vllm.general_plugins")
    assert entry.load() is register


@pytest.mark.parametrize("level", ["pool", "manager"])
@pytest.mark.parametrize("version", [*CHECKED_VERSIONS["pool"], "0.33.0+cpu"])
def test_each_checked_version_gets_the_classes_of_its_release(made_up_vllm, version, level):
    older = "Older" if find_release(version) < (0, 32) else ""
    code = f"""
        import vllm.v1.scheduler, vllm.v1.manager_scheduler, vllm.v1.shared_pool
        register()
        from vllm.v1.scheduler import Pool, SharedPool
        from vllm.v1.manager_scheduler import KVCacheManager
        def name(cls):
            return f"{{cls.__module__}}:{{cls.__qualname__}}"
        assert name(Pool) == "kv_pool.integrations.vllm.pool_classes:{older}BlockPool"
        if {level == "manager"}:
            assert name(KVCacheManager) == "kv_pool.integrations.vllm.manager_classes:{older}KVCacheManager"
            assert KVCacheManager.pool_class is Pool
        assert SharedPool is vllm.v1.shared_pool.SharedPool and issubclass(SharedPool, Pool)
        pool = SharedPool(8, True, 4, owner="me")
        assert (pool.owner, pool.get_num_free_blocks()) == ("me", 7)
        assert Pool(8, True, 4, True, None, medium="CPU").medium == "CPU"
    """
    found, logged = run(made_up_vllm, code, version=version, **NAMED, KV_POOL_VLLM=level)
    assert found == level
    kind, message = logged[0]
    assert kind == "INFO"
    assert message.startswith(f"kv_pool {kv_pool.__version__} (")
    assert f" of vLLM {version}: {8 if level == 'manager' else 6} classes" in message


@pytest.mark.parametrize("version", CHECKED_VERSIONS["pool"])
def test_second_call_keeps_the_pool_with_a_control_socket(made_up_vllm, version):
    code = "register(); from vllm.v1.core import block_pool; first = block_pool.BlockPool; register()"
    code += "; assert block_pool.BlockPool is first"
    _, logged = run(made_up_vllm, code, version=version, **NAMED, KV_POOL_VLLM_CONTROL="1")
    assert len(logged) == 1


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
    level, logged = run(made_up_vllm, code, **NAMED)
    assert level is None
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
    level, logged = run(made_up_vllm, code, **NAMED)
    assert level == "pool"
    assert [level for level, _ in logged] == ["WARNING", "INFO"]
