"""Random options under vLLM's real schedulers: nothing stops them, nothing is left over (marker `vllm`)."""

import pytest
from integrations.vllm_process import run_program

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
@pytest.mark.parametrize("scheduler", ["synchronous", "connector"])
def test_random_options_under_the_scheduler(tmp_path, scheduler, seed):
    program = "request_options/vllm_random_options.py"
    seen, _ = run_program(program, tmp_path, "kv_pool", str(seed), scheduler, KV_POOL_VLLM="manager")
    for what in ("preempted", "aborted", "pinned", "sessions", "retained"):
        assert seen[what] > 0, (what, seen)
    if scheduler == "connector":
        for field in ("retained_tokens", "expires_in_ms", "changed_blocks", "ended_session", "refused"):
            assert seen[f"report {field}"] > 0, (field, seen)
