"""The control socket at level `manager`: requests with their blocks (marker `vllm`)."""

from types import SimpleNamespace

import pytest
from integrations.vllm_names import make_config

from kv_pool.control import ControlClient

pytestmark = pytest.mark.vllm


class EngineRequest:
    """A request of vLLM with the attributes that the manager reads."""

    request_id = "r1"
    num_tokens = num_prompt_tokens = 11
    num_computed_tokens = num_in_flight_tokens = num_preemptions = shared_prefix_boundary = 0
    skip_reading_prefix_cache = False
    block_hashes = (b"first", b"second")
    all_token_ids = tuple(range(11))
    lora_request = sampling_params = mm_features = cache_salt = session_id = status = None


def test_answers_name_the_requests_and_their_blocks(tmp_path, monkeypatch):
    from kv_pool.integrations.vllm.manager_classes import KVCacheManager
    from kv_pool.integrations.vllm.pool_control import make_controlled_manager

    path = tmp_path / "here.sock"
    monkeypatch.setenv("KV_POOL_VLLM_CONTROL", str(path))
    manager = make_controlled_manager(KVCacheManager)(
        make_config(), max_model_len=64, scheduler_block_size=4, hash_block_size=4
    )
    request = EngineRequest()
    assert manager.allocate_slots(request, 11).get_block_ids() == ([1, 2, 3], [4, 5, 6])
    with ControlClient(path) as client:
        [found] = client.describe_sequences().sequences
        assert (found.sequence_id, found.num_blocks) == ("r1", 6)
        assert client.get_statistics().num_sequences == 1
        manager.free(request)
        assert client.describe_sequences().sequences == []


def test_statistics_have_pins_and_the_hit_rate(tmp_path, monkeypatch):
    """They showed 0 pinned blocks and no hit rate, and the list of holds showed no end of the pins."""
    from kv_pool.integrations.vllm.manager_classes import KVCacheManager
    from kv_pool.integrations.vllm.pool_control import make_controlled_manager

    path = tmp_path / "here.sock"
    monkeypatch.setenv("KV_POOL_VLLM_CONTROL", str(path))
    monkeypatch.setenv("KV_POOL_VLLM_MAX_PINNED_BLOCKS", "4")
    manager = make_controlled_manager(KVCacheManager)(
        make_config(21), max_model_len=12, scheduler_block_size=4, hash_block_size=4, watermark=0.1
    )
    request = EngineRequest()
    pin = {"token_range_retention_configs": [{"token_end": 8, "pin": True, "duration_ms": 60_000}]}
    request.sampling_params = SimpleNamespace(extra_args={"kv_pool": pin})
    assert manager.get_computed_blocks(request)[1] == 0
    manager.record_prefix_cache_stats(request, 0)
    manager.allocate_slots(request, 11)
    request.num_computed_tokens = 11
    request.is_finished = lambda: True
    manager.free(request)
    with ControlClient(path) as client:
        told = client.get_statistics()
        assert (told.hit_blocks, told.looked_up_blocks) == (0, 2)
        assert (told.pinned_blocks, told.reserved_blocks) == (4, manager.watermark_blocks)
        assert manager.watermark_blocks > 0
        held = client.list_holds().holds
        assert {hold.reason for hold in held} == {"pinned by a directive"}
        assert sum(hold.num_blocks for hold in held) == 4
        assert all(50 < hold.remaining_s <= 60.1 for hold in held)
        manager.record_prefix_cache_stats(request, 8)
        request.num_preemptions = 1
        manager.record_prefix_cache_stats(request, 8)
        told = client.get_statistics()
        assert (told.hit_blocks, told.looked_up_blocks) == (2, 4)
