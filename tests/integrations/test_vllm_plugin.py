"""kv_pool replaces all or none of vLLM's classes, depending on the environment and on vLLM's version.

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
    "vllm/v1/metrics/stats.py": "class KVCacheEvictionEvent: ...",
    "vllm/v1/core/__init__.py": "",
    "vllm/v1/core/block_pool.py": """
        from vllm.v1.core.kv_cache_utils import KVCacheBlock
        class BlockPool: ...
        class BlockHashToBlockMap: ...
    """,
    "vllm/v1/core/kv_cache_utils.py": """
        class KVCacheBlock: ...
        class FreeKVCacheBlockQueue: ...
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
}

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
    kept = ("SharedPool", "LookupPool", "KVCacheEvictionEvent", "Renamed")
    (owner,) = {owner for name, owner in seen.items() if not name.endswith(kept)}
    return owner == "kv_pool"


def test_every_module_sees_the_new_classes_if_enabled(made_up_vllm):
    seen, logged = run(made_up_vllm, "register()", VLLM_PLUGINS="kv_pool")
    assert is_ours(seen)
    ((level, message),) = logged
    assert level == "INFO"
    assert f"kv_pool {kv_pool.__version__}" in message
    assert "replaces the block pool of vLLM 0.33.0: 6 classes" in message


def test_existing_subclass_derives_from_the_new_class(made_up_vllm):
    code = """
        import vllm.v1.scheduler
        register()
        from vllm.v1.scheduler import Pool, SharedPool
        import vllm.v1.shared_pool
        assert SharedPool is vllm.v1.shared_pool.SharedPool and issubclass(SharedPool, Pool)
        pool = SharedPool(8, True, 4, owner="me")
        assert (pool.owner, pool.get_num_free_blocks()) == ("me", 7)
    """
    run(made_up_vllm, code, VLLM_PLUGINS="kv_pool")


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


def test_options_at_level_pool_are_a_warning(made_up_vllm):
    code = """
        register()
        from types import SimpleNamespace
        from vllm.v1.scheduler import Pool
        pool = Pool(8, True, 4)
        asked = SimpleNamespace(extra_args={"kv_pool": {"demote": True}})
        for number in range(2):
            request = SimpleNamespace(sampling_params=asked, block_hashes=[b"%d" % number])
            blocks = pool.get_new_blocks(1)
            pool.cache_full_blocks(
                request, blocks, num_cached_blocks=0, num_full_blocks=1, block_size=4, kv_cache_group_id=0
            )
            assert pool.get_cached_block(b"%d" % number, [0]) == blocks
    """
    _, logged = run(made_up_vllm, code, VLLM_PLUGINS="kv_pool")
    [message] = [message for level, message in logged if level == "WARNING"]
    assert message == (
        "kv_pool ignores the options in extra_args['kv_pool']: this engine runs vLLM's KV cache manager, "
        "which cannot retain; the operator enables retention with VLLM_PLUGINS=kv_pool and "
        "KV_POOL_VLLM=manager, and the log names what level manager does not serve"
    )


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


@pytest.mark.parametrize("version", CHECKED_VERSIONS["pool"])
def test_each_checked_version_gets_the_pool_of_its_release(made_up_vllm, version):
    set_version(made_up_vllm, version)
    path = find_release(version).pool_class
    code = f"""
        import vllm.v1.scheduler
        register()
        from vllm.v1.scheduler import Pool, SharedPool
        assert f'{{Pool.__module__}}:{{Pool.__qualname__}}' == {path!r}
        assert issubclass(SharedPool, Pool)
        assert Pool(8, True, 4, True, None, medium="CPU").medium == "CPU"
    """
    seen, logged = run(made_up_vllm, code, VLLM_PLUGINS="kv_pool")
    assert is_ours(seen)
    assert f"replaces the block pool of vLLM {version}: 6 classes" in logged[0][1]


@pytest.mark.parametrize("version", CHECKED_VERSIONS["pool"])
def test_second_call_keeps_the_pool_with_a_control_socket(made_up_vllm, version):
    set_version(made_up_vllm, version)
    code = "register(); from vllm.v1.core import block_pool; first = block_pool.BlockPool; register()"
    code += "; assert block_pool.BlockPool is first"
    _, logged = run(made_up_vllm, code, VLLM_PLUGINS="kv_pool", KV_POOL_VLLM_CONTROL="1")
    assert len(logged) == 1


def test_another_build_of_a_checked_version_is_accepted(made_up_vllm):
    set_version(made_up_vllm, "0.33.0+cpu")
    seen, _ = run(made_up_vllm, "register()", VLLM_PLUGINS="kv_pool")
    assert is_ours(seen)


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
    assert not is_ours({name: owner for name, owner in seen.items() if "SecondPool" not in name})
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
    assert is_ours({name: owner for name, owner in seen.items() if "SecondPool" not in name})
    assert [level for level, _ in logged] == ["WARNING", "INFO"]
