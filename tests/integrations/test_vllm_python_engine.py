"""`LLM(...)` and its engine process log wrong settings and options (marker `vllm`)."""

import pytest
from integrations.vllm_process import list_lines, run_program

pytestmark = pytest.mark.vllm

DEMOTE = '{"demote": true}'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def run_engine(options, plugins="kv_pool", **environment):
        """Run the engine; return kv_pool's warnings as (process, message), and vLLM's log."""
        folder = tmp_path_factory.mktemp("engine")
        told, log = run_program("python_engine.py", folder, plugins, options, **environment)
        assert told == [2, 2]
        return {line for line in list_lines(log) if line[0]}, log

    return run_engine


def list_processes(lines, start):
    return sorted(process for process, message in lines if message.startswith(start))


def test_a_misspelt_level_is_in_the_log_of_each_process(run):
    """vLLM configures logging after it has called plugins, and its engine process is forked."""
    lines, log = run(DEMOTE, KV_POOL_VLLM="manger")
    warning = "kv_pool is not used: KV_POOL_VLLM is 'manger'; it is one of pool, manager"
    processes = list_processes(lines, warning)
    assert len(processes) == 2
    assert processes[0] == "EngineCore"
    assert warning in log.splitlines()  # the line of the first process before that


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
    assert [place in message for _, message in refused] == [True, True]


def test_a_level_without_the_plugin_is_in_each_log(run):
    lines, _ = run(DEMOTE, plugins=None, KV_POOL_VLLM="manager")
    warning = "kv_pool is not used: KV_POOL_VLLM needs kv_pool's plugin, and VLLM_PLUGINS is not set; set "
    processes = list_processes(lines, warning)
    assert len(processes) == 2
    assert processes[0] == "EngineCore"
