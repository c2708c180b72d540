"""vLLM's own scheduler on level `manager` with bounded states (marker `vllm`).

The workloads of vLLM issue 45238: 64 prompts of 2,200 tokens over 8 shared prefixes, in blocks of 528 tokens,
one at a time.
"""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_warnings")]

BLOCK = 528
STATES = "KV_POOL_VLLM_STATES"


def make_engine(tmp_path, level, interval=0):
    """Return vLLM's scheduler over a full and a state group, and a function that makes a request."""
    from integrations.made_scheduler import make_config, make_hasher, make_request, make_scheduler
    from integrations.scheduler_side import LEVELS, rebound
    from manager.vllm_manager import make_spec
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    config = make_config(
        tmp_path,
        max_model_len=2400,
        scheduler={"max_num_batched_tokens": 4096, "max_num_seqs": 4},
        cache={"block_size": BLOCK, "enable_prefix_caching": True, "mamba_cache_mode": "align"},
    )
    specs = [
        {"kind": "full", "block_size": BLOCK},
        {"kind": "mamba", "block_size": BLOCK, "mode": "align"},
    ]
    groups = [KVCacheGroupSpec([f"layer {number}"], make_spec(spec)) for number, spec in enumerate(specs)]
    with rebound(LEVELS[level]()):
        scheduler = make_scheduler(
            config,
            groups,
            num_blocks=2000,
            block_size=BLOCK,
            hash_block_size=BLOCK,
            retention_interval=interval,
        )
    hasher = make_hasher(BLOCK)
    return scheduler, lambda name, tokens: make_request(name, tokens, hasher, {"max_tokens": 1})


def count_states(scheduler):
    """Count the cached blocks of the state group."""
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    return sum(
        block.block_hash is not None and block.block_hash[-4:] == bytes([0, 0, 0, 1]) for block in blocks
    )


def replay(scheduler, make, num_shared):
    """Run the prompts; return the cached tokens of each, and the most states that one added."""
    from integrations.made_scheduler import make_answer

    cached, most = [], 0
    for number in range(64):
        prefix = number % 8
        own = range(100_000 + 1000 * number, 100_000 + 1000 * number + 2200 - num_shared)
        request = make(f"r{number}", [*range(2000 * prefix, 2000 * prefix + num_shared), *own])
        scheduler.add_request(request)
        before = count_states(scheduler)
        first = None
        while scheduler.has_requests():
            output = scheduler.schedule()
            first = output if first is None else first
            ends = request.num_computed_tokens >= request.num_prompt_tokens
            sampled = {name: [7] if ends else [] for name in output.num_scheduled_tokens}
            scheduler.update_from_output(output, make_answer(sampled))
        cached.append(first.scheduled_new_reqs[0].num_computed_tokens)
        most = max(most, count_states(scheduler) - before)
    return cached, most


@pytest.mark.parametrize(("num_shared", "shares"), [(1600, [1056, 1584]), (1500, [1056])])
def test_vllm_hits_all_prompts_but_the_first_of_a_prefix(num_shared, shares, tmp_path, monkeypatch):
    monkeypatch.setenv(STATES, "bounded")
    scheduler, make = make_engine(tmp_path, "manager")
    cached, most = replay(scheduler, make, num_shared)
    assert type(scheduler.kv_cache_manager).__module__.startswith("kv_pool")
    assert sum(num_tokens > 0 for num_tokens in cached) == 56
    assert sorted(set(cached)) == [0, *shares]
    assert most <= 2


@pytest.mark.parametrize("num_shared", [1600, 1500])
@pytest.mark.parametrize("level", ["vllm", "manager"])
def test_vllm_s_own_rule_hits_from_the_third_prompt_on(level, num_shared, tmp_path):
    scheduler, make = make_engine(tmp_path, level)
    cached, most = replay(scheduler, make, num_shared)
    assert sum(num_tokens > 0 for num_tokens in cached) == 48
    assert most <= 2


@pytest.mark.parametrize(("states", "interval"), [("bounded", None), ("bounded", 528), ("all", 0)])
def test_other_values_leave_vllm_s_manager(states, interval, tmp_path, monkeypatch):
    monkeypatch.setenv(STATES, states)
    scheduler, _ = make_engine(tmp_path, "manager", interval)
    assert type(scheduler.kv_cache_manager).__module__.startswith("vllm")
