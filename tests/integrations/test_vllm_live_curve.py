"""Live curves under vLLM's scheduler, switched on by an environment variable (marker `vllm`)."""

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_warnings")]

KINDS = ["full", "full groups", "window", "full + window", "full + mamba"]


@pytest.fixture(autouse=True)
def live_curve(monkeypatch):
    """Switch live curves on."""
    monkeypatch.setenv("KV_POOL_VLLM_LIVE_CURVE", "1")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["pool", "manager"])
def test_a_live_curve_changes_no_decision(level, kind):
    from integrations.scheduler_comparison import Comparison
    from integrations.scheduler_side import LEVELS

    from kv_pool.core import invariants

    curves = []

    class CheckedComparison(Comparison):
        def compare(self, their_answer, our_answer, theirs, ours):
            pool = ours.manager.block_pool
            invariants.check_live_curve(pool)
            curves[:] = [pool.live_curve]
            return super().compare(their_answer, our_answer, theirs, ours)

    comparison = CheckedComparison(kind, 3, LEVELS[level](), 150)
    assert comparison.num_steps > 20
    assert comparison.difference == []
    assert curves[0].looked_up_blocks >= curves[0].hit_blocks > 0


def test_a_pool_has_a_curve_only_if_it_is_switched_on(monkeypatch):
    from kv_pool.integrations.vllm.pool_classes import BlockPool

    assert BlockPool(8, True, 4).live_curve.capacity == 7
    assert BlockPool(8, False, 4).live_curve is None
    monkeypatch.setenv("KV_POOL_VLLM_LIVE_CURVE", "0")
    assert BlockPool(8, True, 4).live_curve is None
