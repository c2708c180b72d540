"""`GroupsView`: the attributes of a manager's groups that connectors and tests of an engine read or set."""

import pytest

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
from kv_pool.errors import InvalidArgumentError
from kv_pool.integrations.vllm.group_views import GroupsView, GroupView
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kv_pool.manager.engine.engine_manager import EngineManager
from kv_pool.manager.prefix_rules import PrefixRules

SPECS = [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=4)]


def make_view(specs=SPECS, **rules):
    manager = KVCacheManager(
        BlockPool(40, True, 4), groups=specs, max_model_len=200, prefix_rules=PrefixRules(**rules)
    )
    engine = EngineManager(manager, event_labels=[("full", None), ("other", None)])
    return manager, GroupsView(engine, [GroupView, GroupView], specs, scheduler_block_size=4)


def list_cached(manager, name="r"):
    """Return the positions of the window's blocks that are cached for a new prompt of ten blocks."""
    request = Request(name, range(40), BlockHasher("sha256", block_size=4))
    manager.allocate_slots(request, 40)
    blocks = manager.get_table(name, 1).blocks
    return [position for position, block in enumerate(blocks) if block.block_hash is not None]


@pytest.mark.parametrize("interval", [None, 0, 8, 12, 16])
def test_an_interval_that_is_set_acts_as_that_of_the_rules(interval):
    manager, view = make_view(retention_interval=4)
    view.retention_interval = interval
    assert view.retention_interval == interval
    expected, _ = make_view(retention_interval=interval)
    assert list_cached(manager) == list_cached(expected)


@pytest.mark.parametrize(("interval", "rules"), [(6, {}), (-4, {}), (8, {"bounded_states": True})])
def test_an_interval_that_does_not_fit_changes_nothing(interval, rules):
    manager, view = make_view(**rules)
    with pytest.raises(InvalidArgumentError, match=f"retention_interval is {interval};"):
        view.retention_interval = interval
    assert view.retention_interval == 0
    assert list_cached(manager) == [8]


def test_the_full_attention_group_is_the_first_that_keeps_all_tokens():
    assert make_view(SPECS[::-1])[1].full_attention_group_id == 1
    assert make_view(SPECS[1:] * 2)[1].full_attention_group_id is None


def test_a_state_saved_on_the_way_is_shown_for_its_step():
    specs = [FullAttentionSpec(block_size=4), MambaSpec(block_size=4, prefill_checkpoint_alignment=2)]
    manager, view = make_view(specs)
    request = Request("r", range(15), BlockHasher("sha256", block_size=4))
    saved = view.single_type_managers[1]._checkpoints
    assert dict(saved) == {}
    assert "r" not in saved
    manager.allocate_slots(request, 15)
    assert dict(saved) == {"r": (12, 2)}
    assert len(saved) == 1
    assert manager.get_table("r", 1).blocks[2].num_key_tokens == 12
    request.num_computed_tokens = 15
    manager.begin_step()
    request.append_output_token_ids([1])
    manager.allocate_slots(request, 1)
    assert dict(saved) == {}
    assert saved.get("r") is None
    with pytest.raises(KeyError):
        saved["unknown"]
