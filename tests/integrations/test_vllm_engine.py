"""vLLM's engine caches the same with kv_pool's classes, and its log has what went wrong (marker `vllm`)."""

import pytest
from integrations.vllm_process import VERSION, list_lines, run_program

pytestmark = pytest.mark.vllm

POOL_LINE = f"{VERSION} manages"
DEMOTE = '{"demote": true}'


def test_engine_caches_the_same(tmp_path):
    in_one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # otherwise batching depends on timing
    theirs, log = run_program("vllm_engine.py", tmp_path / "theirs", "", **in_one_process)
    assert "kv_pool" not in log
    ours, log = run_program("vllm_engine.py", tmp_path / "ours", "kv_pool", **in_one_process)
    assert f"{POOL_LINE} 40 KV blocks, medium GPU" in log
    assert ours == theirs
    assert sum(ours) > 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_engine_process_logs_that_it_uses_kv_pool(tmp_path, method):
    cached, log = run_program("vllm_engine.py", tmp_path, "kv_pool", VLLM_WORKER_MULTIPROC_METHOD=method)
    (line,) = [line for line in log.splitlines() if POOL_LINE in line]
    assert line.startswith("(EngineCore pid=")
    assert " INFO " in line
    assert sum(cached) > 0


@pytest.fixture
def run(tmp_path):
    def run_engine(options, plugins="kv_pool", **environment):
        """Run the engine; return kv_pool's warnings as (process, message), and vLLM's log."""
        _, log = run_program("vllm_engine.py", tmp_path, plugins, options, **environment)
        return {line for line in list_lines(log) if line[0]}, log

    return run_engine


def list_processes(lines, start):
    return sorted(process for process, message in lines if message.startswith(start))


@pytest.mark.parametrize(
    ("plugins", "level", "warning"),
    [
        ("kv_pool", "manger", "KV_POOL_VLLM is 'manger'; it is one of pool, manager"),
        (None, "manager", "KV_POOL_VLLM needs kv_pool's plugin, and VLLM_PLUGINS is not set; set "),
    ],
)
def test_a_level_that_is_not_used_is_in_each_log(run, plugins, level, warning):
    """vLLM configures logging after it has called plugins, and its engine process is forked."""
    lines, log = run(DEMOTE, plugins, KV_POOL_VLLM=level)
    processes = list_processes(lines, f"kv_pool is not used: {warning}")
    assert len(processes) == 2
    assert processes[0] == "EngineCore"
    # The line of the first process before that.
    assert any(line.startswith(f"kv_pool is not used: {warning}") for line in log.splitlines())


def test_options_at_level_pool_are_logged_by_the_engine(run):
    lines, _ = run(DEMOTE, KV_POOL_VLLM="pool", KV_POOL_VLLM_MAX_PINNED_BLOCKS="4")
    assert list_processes(lines, "kv_pool ignores the options in extra_args['kv_pool']: ") == ["EngineCore"]
    unused = "kv_pool has a wrong setting: KV_POOL_VLLM_MAX_PINNED_BLOCKS has no effect at level pool"
    assert "EngineCore" in list_processes(lines, unused)


def test_invalid_options_are_logged_by_the_engine(run):
    lines, _ = run('{"demote": 7}', KV_POOL_VLLM="manager")
    refused = [line for line in lines if "refuses the options" in line[1]]
    assert {process for process, _ in refused} == {"EngineCore"}
    place = " in extra_args['kv_pool']: Expected `bool | array`, got `int` - at `$.demote`"
    assert [place in message for _, message in refused] == [True] * 5  # of 16, by powers of two
