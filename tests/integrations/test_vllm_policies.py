"""Cache policies under vLLM's scheduler, selected by an environment variable (marker `vllm`)."""

import pytest
from integrations.scheduler_options import SCHEDULER_KINDS

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_warnings")]

LRU_AS_POLICY = "kv_pool.core.cache_policy:LRU"
NUM_STEPS = 150


def find_difference(monkeypatch, policy, kind, seed, level, theirs="vllm"):
    from integrations.scheduler_comparison import Comparison
    from integrations.scheduler_side import LEVELS

    monkeypatch.setenv("KV_POOL_VLLM_POLICY", policy)
    comparison = Comparison(kind, seed, LEVELS[level](), NUM_STEPS, theirs=theirs)
    assert comparison.num_steps > 20
    return comparison.difference


ALL_HITS_NEED_ALL_BLOCKS = ("full", "full groups", "full groups of other sizes")


@pytest.mark.parametrize(
    ("level", "kind"),
    [
        *[("pool", kind) for kind in ALL_HITS_NEED_ALL_BLOCKS],
        *[("manager", kind) for kind in SCHEDULER_KINDS],
    ],
)
def test_lru_as_a_policy_evicts_what_vllm_evicts(monkeypatch, level, kind):
    """A policy once kept a block with a copy that vLLM evicts, because runs had one parent for good."""
    for seed in range(6):
        assert find_difference(monkeypatch, LRU_AS_POLICY, kind, seed, level) == []


def test_the_pool_level_notices_windows_late(monkeypatch):
    """The guide says so: the pool does not know the groups until a request's first blocks are null."""
    assert find_difference(monkeypatch, LRU_AS_POLICY, "full + larger window blocks", 54, "pool")


def test_a_policy_changes_what_vllm_evicts(monkeypatch):
    assert any(find_difference(monkeypatch, "fifo", "full", seed, "pool") for seed in range(6, 9))


def test_hints_of_clients_reach_the_policy(monkeypatch, tmp_path):
    """The first of two equal chats expects a tool's answer, and so it stays."""
    monkeypatch.setenv("KV_POOL_VLLM_POLICY", "ttl")
    scheduler = make_small_scheduler(tmp_path, 13)
    hints = {"ttl_s": 600, "category": "agent"}
    serve(scheduler, "waits", range(100, 117), {"kv_transfer_params": {"kv_pool": {"hints": hints}}})
    serve(scheduler, "text", range(200, 217), {"kv_pool": '{"hints": {"ttl_s": 600}}'})
    serve(scheduler, "broken", range(300, 317), {"kv_pool": {"hints": {"ttl_s": "long"}}})
    serve(scheduler, "ends", range(400, 417), {})
    policy = scheduler.kv_cache_manager.block_pool.policy_host.policy
    sent = [run.hints for queue in policy.queues for run in queue.list_runs()]
    assert sent == [None, hints, {"ttl_s": 600}]
    for number in range(5):
        serve(scheduler, f"other {number}", range(500 + 20 * number, 517 + 20 * number), {})
    names = {"waits": 100, "text": 200, "broken": 300, "ends": 400}
    hits = {name: serve(scheduler, f"{name} again", range(at, at + 17), {}) for name, at in names.items()}
    assert hits == {"waits": 16, "text": 16, "broken": 0, "ends": 0}


def make_small_scheduler(folder, num_blocks):
    """Return a scheduler with our manager over blocks of 4 tokens."""
    from integrations.made_scheduler import make_config, make_scheduler
    from integrations.scheduler_side import manager_classes, rebound
    from manager.vllm_manager import make_spec
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec

    config = make_config(
        folder,
        max_model_len=4 * num_blocks,
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 4 * num_blocks},
        cache={"block_size": 4, "enable_prefix_caching": True},
    )
    group = KVCacheGroupSpec(["layer"], make_spec({"kind": "full", "block_size": 4}))
    with rebound(manager_classes()):
        return make_scheduler(config, [group], num_blocks=num_blocks + 1, block_size=4)


def serve(scheduler, name, tokens, extra_args):
    """Serve a request with one output token, and return the number of hit tokens."""
    from integrations.made_scheduler import make_answer, make_hasher, make_request

    sampling = {"max_tokens": 1, "ignore_eos": True, "extra_args": extra_args}
    scheduler.add_request(make_request(name, list(tokens), make_hasher(4), sampling))
    output = scheduler.schedule()
    scheduler.update_from_output(output, make_answer({name: [2]}))
    return output.scheduled_new_reqs[0].num_computed_tokens


def test_a_policy_without_prefix_caching_is_ignored(monkeypatch):
    from kv_pool.integrations.vllm.pool_classes import BlockPool

    monkeypatch.setenv("KV_POOL_VLLM_POLICY", "s3fifo")
    assert BlockPool(8, False, 4).policy_host is None
    assert BlockPool(8, True, 4).policy_host.name == "s3fifo"
    monkeypatch.setenv("KV_POOL_VLLM_POLICY", "")
    assert BlockPool(8, True, 4).policy_host is None
