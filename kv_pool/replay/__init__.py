"""Production traces, replayed through the manager and the pool that an engine uses."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_pool.errors import DrawingError, TraceError, WorkerLostError
    from kv_pool.replay.capacity import ModelKV, find_model
    from kv_pool.replay.compare.compare import compare_policies
    from kv_pool.replay.compare.compare_plot import draw_comparison
    from kv_pool.replay.compare.compare_settings import ComparedTrace, CompareSettings
    from kv_pool.replay.compare.comparison import Comparison
    from kv_pool.replay.curves.curve_plot import draw_curves
    from kv_pool.replay.curves.curve_report import CurveReport
    from kv_pool.replay.curves.measure import measure_curves
    from kv_pool.replay.formats.convert import ConvertSettings, convert_trace
    from kv_pool.replay.merge import merge_traces
    from kv_pool.replay.plan.goals import PlanGoal, Prices
    from kv_pool.replay.plan.make_plan import plan_capacity
    from kv_pool.replay.plan.plan_plot import draw_plan
    from kv_pool.replay.plan.plan_report import CapacityPlan
    from kv_pool.replay.plan.plan_words import describe_plan
    from kv_pool.replay.plot import draw_hit_rates
    from kv_pool.replay.plot_breakdown import draw_breakdowns
    from kv_pool.replay.report import ReplayReport, read_reports, write_json
    from kv_pool.replay.request_outcomes import RequestOutcome
    from kv_pool.replay.settings import EngineRates, ReplaySettings
    from kv_pool.replay.simulator import run_replay
    from kv_pool.replay.split import split_trace
    from kv_pool.replay.sweep import run_sweep
    from kv_pool.replay.trace import Trace, TraceRequest, find_trace
    from kv_pool.replay.trace_info import TraceInfo, describe_trace
    from kv_pool.replay.trace_writer import open_trace_writer
    from kv_pool.replay.worker_processes import WorkerProcesses
    from kv_pool.replay.workloads.agent import AgentSettings, generate_agent
    from kv_pool.replay.workloads.chat import ChatSettings, generate_chat
    from kv_pool.replay.workloads.distributions import Distribution
    from kv_pool.replay.workloads.rag import RAGSettings, generate_rag
else:
    from kv_pool.lazy_names import export_lazily

    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "kv_pool.errors": (
                "TraceError",
                "WorkerLostError",
                "DrawingError",
            ),
            "kv_pool.replay.capacity": (
                "ModelKV",
                "find_model",
            ),
            "kv_pool.replay.compare.compare": ("compare_policies",),
            "kv_pool.replay.compare.compare_plot": ("draw_comparison",),
            "kv_pool.replay.compare.compare_settings": (
                "CompareSettings",
                "ComparedTrace",
            ),
            "kv_pool.replay.compare.comparison": ("Comparison",),
            "kv_pool.replay.worker_processes": ("WorkerProcesses",),
            "kv_pool.replay.curves.curve_plot": ("draw_curves",),
            "kv_pool.replay.curves.curve_report": ("CurveReport",),
            "kv_pool.replay.curves.measure": ("measure_curves",),
            "kv_pool.replay.plan.goals": (
                "PlanGoal",
                "Prices",
            ),
            "kv_pool.replay.plan.make_plan": ("plan_capacity",),
            "kv_pool.replay.plan.plan_plot": ("draw_plan",),
            "kv_pool.replay.plan.plan_report": ("CapacityPlan",),
            "kv_pool.replay.plan.plan_words": ("describe_plan",),
            "kv_pool.replay.plot": ("draw_hit_rates",),
            "kv_pool.replay.report": (
                "ReplayReport",
                "read_reports",
                "write_json",
            ),
            "kv_pool.replay.request_outcomes": ("RequestOutcome",),
            "kv_pool.replay.settings": (
                "ReplaySettings",
                "EngineRates",
            ),
            "kv_pool.replay.simulator": ("run_replay",),
            "kv_pool.replay.sweep": ("run_sweep",),
            "kv_pool.replay.trace": (
                "Trace",
                "TraceRequest",
                "find_trace",
            ),
            "kv_pool.replay.formats.convert": (
                "ConvertSettings",
                "convert_trace",
            ),
            "kv_pool.replay.merge": ("merge_traces",),
            "kv_pool.replay.plot_breakdown": ("draw_breakdowns",),
            "kv_pool.replay.split": ("split_trace",),
            "kv_pool.replay.trace_info": (
                "TraceInfo",
                "describe_trace",
            ),
            "kv_pool.replay.trace_writer": ("open_trace_writer",),
            "kv_pool.replay.workloads.agent": (
                "AgentSettings",
                "generate_agent",
            ),
            "kv_pool.replay.workloads.chat": (
                "ChatSettings",
                "generate_chat",
            ),
            "kv_pool.replay.workloads.distributions": ("Distribution",),
            "kv_pool.replay.workloads.rag": (
                "RAGSettings",
                "generate_rag",
            ),
        },
    )

__all__ = [
    "run_replay",
    "ReplaySettings",
    "ReplayReport",
    "RequestOutcome",
    "run_sweep",
    "measure_curves",
    "CurveReport",
    "plan_capacity",
    "PlanGoal",
    "Prices",
    "CapacityPlan",
    "describe_plan",
    "compare_policies",
    "CompareSettings",
    "ComparedTrace",
    "Comparison",
    "WorkerProcesses",
    "Trace",
    "TraceRequest",
    "find_trace",
    "TraceInfo",
    "describe_trace",
    "ChatSettings",
    "generate_chat",
    "AgentSettings",
    "generate_agent",
    "RAGSettings",
    "generate_rag",
    "Distribution",
    "open_trace_writer",
    "merge_traces",
    "split_trace",
    "ConvertSettings",
    "convert_trace",
    "EngineRates",
    "ModelKV",
    "find_model",
    "draw_hit_rates",
    "draw_breakdowns",
    "draw_curves",
    "draw_plan",
    "draw_comparison",
    "read_reports",
    "write_json",
    "TraceError",
    "WorkerLostError",
    "DrawingError",
]
