"""`plan_capacity`: recommends a capacity for a trace, and replays each recommendation."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from kv_pool.lab.capacity import ModelKV, count_blocks
from kv_pool.lab.curves.measure import USED
from kv_pool.lab.plan.plan_curve import PlanCurve, grow, shrink
from kv_pool.lab.plan.plan_report import (
    CapacityPlan,
    PlanBlockSize,
    PlanCheck,
    PlanDemand,
    PlanGoal,
    PlanTier,
)
from kv_pool.lab.report import OnProgress, ReplayReport, make_provenance
from kv_pool.lab.request_outcomes import RequestOutcome
from kv_pool.lab.settings import ReplaySettings, ReplayTrace
from kv_pool.lab.simulator import run_replay

BLOCK_SIZES = (16, 32, 64, 128, 256, 512)
TOLERANCE = 0.01
"""The largest difference of token hit rates at which an estimate agrees with its replay."""

_GIB = 2**30
_MULTIPLES = (4, 16)
_MOST_DEMAND_BLOCKS = 1_000_000


def plan_capacity(
    settings: ReplaySettings,
    model: ModelKV,
    goal: PlanGoal | None = None,
    *,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    on_progress: OnProgress | None = None,
) -> CapacityPlan:
    """Recommend a capacity for a trace, from its LRU curve, and replay what is recommended.

    Args:
        settings: the trace, how it is read, and the engine. `clock` decides whether requests overlap and
            generate. `num_blocks` and `block_bytes` are ignored. The model is that of full attention.
        model: for the bytes of a block and the FLOPs of prompts.
        goal: None for the knee of the curve.
        host_bytes, disk_bytes: memory of the tiers; 0 for none. None: 4 and 16 times the pool, or by price.
        block_sizes: to compare. Of a trace of hash ids, only multiples of its block size are compared.
        on_progress: called with the shares of one part of the work after the other.
    Raises:
        TraceError: the trace cannot be read, or its ids do not identify prefixes.
        InvalidArgumentError: a setting has no effect on a plan, no capacity has the hit rate, the memory is
            too small for the largest request, or prices need arrival times that the trace does not have.

    Cost: one reading of the trace for each block size, and two to five replays.
    """
    why = "it is for LRU and full attention, and chooses tiers itself; leave the default"
    settings.check_used((*USED, "clock", *asdict(settings.rates)), "a plan", why)
    replace(settings, num_blocks=1, block_bytes=0).check()
    notify = on_progress or (lambda doing, share: None)
    return _Planner(settings, model, goal or PlanGoal(), (host_bytes, disk_bytes), block_sizes, notify).plan()


@dataclass
class _Planner:
    """The parts of one plan."""

    settings: ReplaySettings
    model: ModelKV
    goal: PlanGoal
    tier_bytes: tuple[int | None, int | None]  # host and disk
    block_sizes: Sequence[int]
    notify: OnProgress

    def __post_init__(self) -> None:
        self._trace = self.settings.open_trace()
        self._curve = self._read(self._trace)
        self._checks: list[PlanCheck] = []

    def plan(self) -> CapacityPlan:
        curve, goal = self._curve, self.goal
        goal_blocks = curve.find_goal(goal)
        demand = self._measure_demand()
        of_demand, self._checks = self._checks, []
        num_blocks = goal_blocks
        if demand is not None and goal.memory_bytes is None:
            if goal.prices is not None:
                goal_blocks = curve.find_goal(goal, demand.p99_blocks)
            num_blocks = max(goal_blocks, demand.p99_blocks)
        self._replay("pool", curve, num_blocks)
        tiers = self._plan_tiers(num_blocks)
        compared, best = self._compare_block_sizes(num_blocks)
        checks = self._checks + [check for check in of_demand if check.num_blocks >= curve.full_capacity]
        rate = curve.find_rate(num_blocks)
        point = curve.make_point(num_blocks)
        prices = goal.prices
        return CapacityPlan(
            goal=goal.name,
            target_hit_rate=goal.target_hit_rate,
            prices=prices,
            block_size=self._curve.block_size,
            block_bytes=curve.block_bytes,
            clock=self.settings.clock,
            requests=curve.requests,
            tokens_in=curve.tokens_in,
            largest_request=curve.largest_request,
            span_hours=curve.span_hours,
            goal_blocks=goal_blocks,
            recommended=point,
            points_of_more=100 * (curve.find_rate(grow(num_blocks)) - rate),
            points_of_less=100 * (rate - curve.find_rate(shrink(num_blocks))),
            cost_per_hour=None if prices is None else prices.gpu * point.memory_bytes / _GIB,
            saved_per_hour=(
                None if prices is None else curve.save_per_hour(curve.count_tokens(num_blocks), prices)
            ),
            knee=curve.knee,
            ceiling=curve.find_rate(curve.full_capacity),
            full_blocks=curve.full_capacity,
            points=[curve.make_point(capacity) for capacity in curve.capacities],
            demand=demand,
            tiers=tiers,
            block_sizes=compared,
            best_block_size=best,
            checks=checks,
            broken_lines=self._trace.num_broken,
            first_broken=self._trace.first_broken,
            settings=self.settings.describe(),
            provenance=make_provenance(self._trace, self._trace.digest(), self.settings.seed),
        )

    def _read(self, trace: ReplayTrace) -> PlanCurve:
        doing = f"reading, blocks of {trace.pool_block_size} tokens"
        return PlanCurve(trace, self.model, lambda share: self.notify(doing, share))

    def _measure_demand(self) -> PlanDemand | None:
        """Replay the trace in a pool for all its blocks, up to a limit. None with the instant clock."""
        if self.settings.clock != "trace":
            return None
        curve = self._curve
        num_blocks = max(min(curve.num_distinct, _MOST_DEMAND_BLOCKS), curve.largest_request)
        report = self._replay("pool for all blocks", curve, num_blocks)
        return PlanDemand(
            num_blocks=num_blocks,
            mean_blocks=report.mean_blocks_in_use,
            p99_blocks=report.p99_blocks_in_use,
            peak_blocks=report.peak_blocks_in_use,
            mean_running=report.mean_running,
            peak_running=report.peak_running,
        )

    def _plan_tiers(self, num_blocks: int) -> list[PlanTier]:
        """Return the tiers, after a replay of each."""
        curve, prices = self._curve, self.goal.prices
        tier_prices = (None, None) if prices is None else (prices.host, prices.disk)
        wanted = zip(("host", "disk"), self.tier_bytes, _MULTIPLES, tier_prices, strict=True)
        planned: list[PlanTier] = []
        sizes: dict[str, int] = {}
        for name, memory_bytes, multiple, price in wanted:
            above = list(sizes.values())
            if memory_bytes is None:
                size = curve.choose_tier(num_blocks, above, multiple, prices, price)
            else:
                size = memory_bytes // curve.block_bytes
            if not size:
                continue
            upper = ", ".join(["pool", *sizes])
            sizes[name] = size
            memory = size * curve.block_bytes
            rate = curve.find_rate(curve.combine(num_blocks, [*above, size]))
            points = 100 * (rate - curve.find_rate(curve.combine(num_blocks, above)))
            planned.append(PlanTier(name, size, memory, rate, points, points / (memory / _GIB)))
            self._replay(f"{upper} and {name}", curve, num_blocks, sizes.get("host", 0), sizes.get("disk", 0))
        return planned

    def _compare_block_sizes(self, num_blocks: int) -> tuple[list[PlanBlockSize], int | None]:
        """Return the block sizes and the best of them, after a replay of it."""
        tokens_per_id = self._trace.block_size
        usable = {size for size in self.block_sizes if tokens_per_id is None or size % tokens_per_id == 0}
        if not usable - {self._curve.block_size}:
            return [], None
        memory_bytes = self._curve.measure_pool(num_blocks)
        found: list[PlanBlockSize] = []
        curves: dict[int, PlanCurve] = {self._curve.block_size: self._curve}
        for size in sorted(usable | {self._curve.block_size}):
            if memory_bytes < 2 * self.model.count_block_bytes(size):
                continue
            if size not in curves:
                curves[size] = self._read(replace(self.settings, block_size=size).open_trace())
            curve = curves[size]
            capacity = count_blocks(memory_bytes, size, self.model)
            refuses = capacity < curve.largest_request
            found.append(PlanBlockSize(size, capacity, curve.find_rate(capacity), refuses))
        best = max(found, key=lambda one: (not one.refuses, one.token_hit_rate, one.block_size))
        if best.block_size != self._curve.block_size:
            self._replay(f"pool, blocks of {best.block_size}", curves[best.block_size], best.num_blocks)
        return found, best.block_size

    def _replay(
        self, name: str, curve: PlanCurve, num_blocks: int, host: int = 0, disk: int = 0
    ) -> ReplayReport:
        """Replay a pool and its tiers. Append the curve's prediction beside the replay to the checks."""
        num_flops = num_saved = 0

        def note(outcome: RequestOutcome) -> None:
            nonlocal num_flops, num_saved
            num_flops += self.model.count_flops(outcome.input_length)
            num_saved += self.model.count_flops(outcome.tokens_hit)

        settings = replace(
            self.settings,
            num_blocks=num_blocks,
            block_size=curve.block_size,
            host_tier=host,
            disk_tier=disk,
            block_bytes=curve.block_bytes,
        )
        doing = f"replaying: {name}"
        report = run_replay(settings, lambda _, share: self.notify(doing, share), on_outcome=note)
        predicted = curve.count_tokens(curve.combine(num_blocks, [size for size in (host, disk) if size]))
        tolerance = 0.0 if report.clock == "instant" and not host + disk else TOLERANCE
        check = PlanCheck(
            name=name,
            block_size=report.block_size,
            num_blocks=report.num_blocks,
            host_blocks=host,
            disk_blocks=disk,
            predicted=predicted / curve.tokens_in,
            replayed=report.token_hit_rate,
            predicted_tokens=predicted,
            replayed_tokens=report.tokens_hit,
            tolerance=tolerance,
            agrees=abs(predicted - report.tokens_hit) <= tolerance * curve.tokens_in,
            waited_ms=report.waiting.mean_ms,
            preempted=report.preempted,
            refused=report.refused_requests,
            speedup_by_tokens=_divide(report.tokens_in, report.tokens_hit),
            speedup_by_flops=_divide(num_flops, num_saved),
        )
        self._checks.append(check)
        return report


def _divide(total: int, saved: int) -> float | None:
    """Return the total divided by what is left of it; None if nothing is left."""
    return total / (total - saved) if total > saved else None
