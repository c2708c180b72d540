"""Plans of small traces for tests: a model whose blocks of 8 tokens have 64 bytes."""

from lab.made_trace import write_trace

from kv_pool.lab.capacity import ModelKV
from kv_pool.lab.plan.make_plan import BLOCK_SIZES, plan_capacity
from kv_pool.lab.plan.plan_report import PlanGoal
from kv_pool.lab.settings import ReplaySettings

MODEL = ModelKV(1, 1, 2)


def make_settings(folder, records, **changes):
    path = write_trace(folder / "trace.jsonl", records)
    return ReplaySettings(str(path), 1, **{"trace_block_size": 8, "clock": "trace", **changes})


def plan_records(folder, records, memory=None, block_sizes=BLOCK_SIZES, **changes):
    """Return a plan for `memory` blocks of 8 tokens, or for the knee."""
    goal = None if memory is None else PlanGoal(memory_bytes=(memory + 1) * 64)
    return plan_capacity(make_settings(folder, records, **changes), MODEL, goal, block_sizes=block_sizes)
