"""The control socket at level `manager`: requests with their blocks (marker `vllm`)."""

import pytest
from integrations.test_vllm_manager_names import make_config

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
    lora_request = mm_features = cache_salt = session_id = status = None


def test_answers_name_the_requests_and_their_blocks(tmp_path, monkeypatch):
    from kv_pool.integrations.vllm.controlled_manager import make_controlled_manager
    from kv_pool.integrations.vllm.manager_classes import KVCacheManager

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
