"""`Sizing`: chooses capacities of the pool and of its tiers for a goal, from the curve of a trace."""

from collections.abc import Callable, Sequence

from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.capacity import ModelKV, count_blocks
from kv_pool.replay.curves.curve_report import locate_knee
from kv_pool.replay.curves.measure import choose_capacities
from kv_pool.replay.plan.goals import PlanGoal, Prices
from kv_pool.replay.plan.plan_curve import PlanCurve
from kv_pool.replay.plan.plan_report import PlanPoint

_GIB = 2**30
_MS_PER_HOUR = 3_600_000
_MORE = 0.1


class Sizing:
    """The capacities that a curve suggests.

    Args:
        curve: the predicted hits.
        model: for the bytes of blocks.

    Attributes:
        block_bytes: size of a block.
        span_hours: time from the first to the last arrival.
        capacities: of the curve's points: at most 64 in equal ratios, from the largest request to the least
            capacity that has all hits.
        knee: as `locate_knee` finds it among these; None if there is none.
    """

    def __init__(self, curve: PlanCurve, model: ModelKV) -> None:
        self.curve = curve
        self.block_bytes = model.count_block_bytes(curve.block_size)
        self.span_hours = curve.span_ms / _MS_PER_HOUR
        self.capacities = choose_capacities(curve.largest_request, curve.full_capacity)
        self.knee = locate_knee(self.capacities, [curve.find_rate(capacity) for capacity in self.capacities])
        self._model = model

    def find_goal(self, goal: PlanGoal, least: int = 0) -> int:
        """Return the capacity in blocks for a goal. Without a knee, it is the one that has all hits.

        Args:
            least: the smallest capacity among which prices choose.
        Raises:
            InvalidArgumentError: no capacity has the hit rate, the memory is too small for the largest
                request, or the trace has no arrival times, which prices need.
        """
        curve = self.curve
        if goal.target_hit_rate is not None:
            found = curve.find_capacity(goal.target_hit_rate)
            if found is None:
                full = curve.full_capacity
                raise InvalidArgumentError(
                    f"no capacity has a token hit rate of {goal.target_hit_rate:.2%}: without evictions the "
                    f"trace has {curve.find_rate(full):.2%}, from {self.measure_pool(full) / _GIB:,.2f} GiB "
                    f"({full:,} blocks) on; choose a target up to that"
                )
            return found
        if goal.memory_bytes is not None:
            return self._find_memory(goal.memory_bytes)
        if goal.prices is not None:
            if not self.span_hours:
                raise InvalidArgumentError(
                    "all requests of the trace arrive at the same time, so it has no tokens per hour, which "
                    "prices need; use timestamps, or another goal"
                )
            prices = goal.prices
            return self._maximize(
                sorted({max(capacity, least) for capacity in self.capacities}),
                prices,
                prices.gpu,
                self.measure_pool,
                curve.count_tokens,
            )
        return self.knee or curve.full_capacity

    def choose_tier(
        self, num_blocks: int, tiers: Sequence[int], multiple: int, prices: Prices | None, price: float | None
    ) -> int:
        """Return the capacity in blocks of a tier below `num_blocks` blocks and `tiers`.

        With prices it is the one at which savings minus costs are largest, or 0 if the tier has no price.
        Otherwise it is `multiple` times the pool, at most the capacity that has all hits, and 0 if the blocks
        above the tier have all hits.
        """
        full = self.curve.full_capacity
        if prices is None:
            above = self.curve.combine(num_blocks, tiers)
            return 0 if above >= full else min(multiple * num_blocks, full)
        if price is None:
            return 0
        return self._maximize(
            [0, *choose_capacities(1, full)],
            prices,
            price,
            lambda tier: tier * self.block_bytes,
            lambda tier: self.curve.count_tokens(self.curve.combine(num_blocks, [*tiers, tier])),
        )

    def save_per_hour(self, num_tokens: int, prices: Prices) -> float:
        """Return what these hits of the whole trace save in an hour, on average."""
        return num_tokens * prices.prefill / 1e6 / self.span_hours

    def measure_pool(self, num_blocks: int) -> int:
        """Return the bytes of a pool, with its null block."""
        return (num_blocks + 1) * self.block_bytes

    def make_point(self, num_blocks: int) -> PlanPoint:
        """Return what the curve says about a capacity."""
        curve = self.curve
        rate = curve.find_rate(num_blocks)
        more = grow(num_blocks)
        gained = 100 * (curve.find_rate(more) - rate)
        left = curve.tokens_in - curve.count_tokens(num_blocks)
        return PlanPoint(
            num_blocks=num_blocks,
            memory_bytes=self.measure_pool(num_blocks),
            token_hit_rate=rate,
            points_per_gib=gained / ((more - num_blocks) * self.block_bytes / _GIB),
            prefill_speedup=curve.tokens_in / left if left else None,
        )

    def _find_memory(self, memory_bytes: int) -> int:
        largest = self.curve.largest_request
        num_blocks = max(0, memory_bytes // self.block_bytes - 1)
        if num_blocks < largest:
            raise InvalidArgumentError(
                f"{memory_bytes / _GIB:,.2f} GiB hold {num_blocks:,} blocks of {self.curve.block_size} "
                f"tokens besides the null block, and the largest request needs {largest:,}; use at least "
                f"{self.measure_pool(largest) / _GIB:,.2f} GiB, or fewer bytes per element"
            )
        return count_blocks(memory_bytes, self.curve.block_size, self._model)

    def _maximize(
        self,
        capacities: Sequence[int],
        prices: Prices,
        price: float,
        measure: Callable[[int], int],
        count_tokens: Callable[[int], int],
    ) -> int:
        """Return the capacity with the largest savings minus costs; of equal ones the smallest."""
        return max(
            capacities,
            key=lambda capacity: (
                self.save_per_hour(count_tokens(capacity), prices) - price * measure(capacity) / _GIB,
                -capacity,
            ),
        )


def grow(num_blocks: int) -> int:
    """Return a capacity that is 10 % larger, by at least one block."""
    return max(num_blocks + 1, round(num_blocks * (1 + _MORE)))


def shrink(num_blocks: int) -> int:
    """Return a capacity that is 10 % smaller."""
    return round(num_blocks * (1 - _MORE))
