"""Production traces, replayed through the manager and the pool that an engine uses."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_pool.errors import DrawingError, TraceError, WorkerLostError
    from kv_pool.replay.capacity import ModelKV, find_model
    from kv_pool.replay.curves.curve_plot import draw_curves
    from kv_pool.replay.curves.curve_report import CurveReport
    from kv_pool.replay.curves.measure import measure_curves
    from kv_pool.replay.plot import draw_hit_rates
    from kv_pool.replay.report import ReplayReport, read_reports, write_json
    from kv_pool.replay.request_outcomes import RequestOutcome
    from kv_pool.replay.settings import EngineRates, ReplaySettings
    from kv_pool.replay.simulator import run_replay
    from kv_pool.replay.sweep import run_sweep
    from kv_pool.replay.trace import Trace, TraceRequest, find_trace
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
            "kv_pool.replay.curves.curve_plot": ("draw_curves",),
            "kv_pool.replay.curves.curve_report": ("CurveReport",),
            "kv_pool.replay.curves.measure": ("measure_curves",),
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
    "Trace",
    "TraceRequest",
    "find_trace",
    "EngineRates",
    "ModelKV",
    "find_model",
    "draw_hit_rates",
    "draw_curves",
    "read_reports",
    "write_json",
    "TraceError",
    "WorkerLostError",
    "DrawingError",
]
