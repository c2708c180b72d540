"""`ReturnTimes`: how soon freed blocks are used again, by class and age, and what keeping them is worth."""

from math import exp, expm1, log
from typing import Final

from mypy_extensions import i64

NUM_AGES: Final = 13
NUM_COHORTS: Final = 48

_FIRST_AGE: Final = 1 / 64
_HALF_LIFE: Final = 8.0  # in scales
_PRIOR_RATE: Final = 0.1  # returns per block and age, before any is seen


class ReturnTimes:
    """The rate at which blocks return, by class and age, from what was seen so far.

    Blocks enter when they are freed, and leave when they return, cached or evicted, or are forgotten. Blocks
    that entered one after the other form a cohort. Old neighbouring cohorts are merged, so that the length of
    a cohort grows with its age. Rates are returns per block and unit of time, with a half-life.

    Args:
        capacity: number of blocks of the pool.
        num_classes: number of classes.

    Attributes:
        bounds: the least age of each of `NUM_AGES` ages, in octaves around the scale. Empty before
            `set_scale`.
        values: for each class and age, class by class: the most returns per block and time that keeping a
            block can give (Gittins index).
    """

    def __init__(self, capacity: int, num_classes: int) -> None:
        self.num_classes: int = num_classes
        self.cohort_blocks: int = max(1, capacity // 32)
        self.prior_blocks: float = max(1.0, capacity / 8)
        self.bounds: list[float] = []
        self.widths: list[float] = []
        self.scale: float = 0.0
        self.time: float = 0.0
        self.num_entered: int = 0
        self.values: list[float] = [0.0] * (num_classes * NUM_AGES)
        self.num_returned: list[float] = [0.0] * (num_classes * NUM_AGES)
        self.exposures: list[float] = [0.0] * (num_classes * NUM_AGES)
        # Cohorts, oldest first: number of blocks that entered before, time of the first, and of those that
        # entered and have not left the number in all, by class, and of evicted ones.
        self.starts: list[int] = []
        self.times: list[float] = []
        self.totals: list[int] = []
        self.counts: list[list[int]] = []
        self.evicted: list[int] = []

    def set_scale(self, scale: float) -> None:
        """Set the time in which the pool is filled. Rates are counted from now on."""
        self.scale = scale
        steps = [scale * _FIRST_AGE * 2.0**age for age in range(NUM_AGES)]
        self.bounds = [0.0, *steps[:-1]]
        self.widths = [steps[age] - self.bounds[age] for age in range(NUM_AGES)]
        self.update_values()

    def find_age(self, seconds: float) -> int:
        """Return the number of an age, 0 to NUM_AGES - 1. O(NUM_AGES)."""
        bounds = self.bounds  # searched in C: a call of bisect costs more than the few steps
        age: i64 = len(bounds) - 1
        while age > 0 and seconds < bounds[age]:
            age -= 1
        return max(0, age)

    def enter(self, now: float, kind: int, num_blocks: int) -> int:
        """Handle freed blocks of a class. Return their stamp, above 0."""
        if not self.starts or self.num_entered - self.starts[-1] >= self.cohort_blocks:
            self._add_cohort(now)
        self.totals[-1] = self.totals[-1] + num_blocks  # compiled code adds in place as Python does
        self.counts[-1][kind] = self.counts[-1][kind] + num_blocks
        self.num_entered += num_blocks
        return self.num_entered

    def note_evicted(self, stamp: int, num_blocks: int) -> None:
        """Handle the eviction of blocks. O(NUM_COHORTS)."""
        self.evicted[self._find_cohort(stamp)] += num_blocks

    def count_recent(self, num_blocks: int) -> tuple[int, int]:
        """Return the stamp of the last `num_blocks` blocks that have not left, and how many are evicted.

        Of whole cohorts; the stamp is that of the blocks that entered before them. O(NUM_COHORTS).
        """
        num_evicted = 0
        for place in range(len(self.totals) - 1, -1, -1):
            num_blocks -= self.totals[place]
            if num_blocks < 0:
                return self.starts[place + 1] if place + 1 < len(
                    self.starts
                ) else self.num_entered, num_evicted
            num_evicted += self.evicted[place]
        return 0, num_evicted

    def _find_cohort(self, stamp: i64) -> i64:
        starts = self.starts  # the last cohorts are asked for most
        place: i64 = len(starts) - 1
        while place > 0 and starts[place] >= stamp:
            place -= 1
        return place

    def leave(self, stamp: int, kind: int, num_blocks: int, is_evicted: bool = False) -> int:
        """Handle blocks that return or are forgotten. Return the number of blocks that entered after them.

        Blocks that have left again are not counted. O(NUM_COHORTS).
        """
        place = self._find_cohort(stamp)
        if is_evicted:
            self.evicted[place] -= num_blocks
        self.totals[place] = self.totals[place] - num_blocks
        self.counts[place][kind] = self.counts[place][kind] - num_blocks
        num_after = self.totals[place] // 2
        for other in range(place + 1, len(self.totals)):
            num_after += self.totals[other]
        return num_after

    def note_return(self, kind: int, seconds: float, num_blocks: int) -> int:
        """Handle the return of blocks of a class. Return the number of their age."""
        age = self.find_age(seconds)
        if self.bounds:
            self.num_returned[kind * NUM_AGES + age] += num_blocks
        return age

    def _add_cohort(self, now: float) -> None:
        """Count the time since the last cohort for all blocks, and begin another."""
        if self.bounds and now > self.time:
            self._count_time(now)
        self.time = now
        if len(self.starts) >= NUM_COHORTS:
            self._merge(now)
        self.starts.append(self.num_entered)
        self.times.append(now)
        self.totals.append(0)
        self.counts.append([0] * self.num_classes)
        self.evicted.append(0)

    def _count_time(self, now: float) -> None:
        seconds = now - self.time
        share = 0.5 ** (seconds / (_HALF_LIFE * self.scale))
        for place in range(len(self.exposures)):
            self.exposures[place] *= share
            self.num_returned[place] *= share
        middle = self.time + seconds / 2
        for cohort in range(len(self.starts)):
            if self.totals[cohort] > 0:
                is_last = cohort + 1 == len(self.starts)  # it has entered in this time, half of it on average
                end = self.time if is_last else self.times[cohort + 1]
                age = self.find_age(middle - (self.times[cohort] + end) / 2)
                for kind, count in enumerate(self.counts[cohort]):
                    if count == 0:
                        continue
                    self.exposures[kind * NUM_AGES + age] += count * (seconds / 2 if is_last else seconds)

    def _merge(self, now: float) -> None:
        """Merge the two neighbouring cohorts that are shortest for their age; not the last ones."""
        best, place = 2.0, 0
        for cohort in range(len(self.starts) - 3):
            entered = self.num_entered - self.starts[cohort]
            ratio = (self.starts[cohort + 2] - self.starts[cohort]) / entered
            if ratio < best:
                best, place = ratio, cohort
        after = place + 1
        self.totals[place] += self.totals[after]
        self.evicted[place] += self.evicted[after]
        for kind in range(self.num_classes):
            self.counts[place][kind] += self.counts[after][kind]
        del self.starts[after], self.times[after], self.totals[after], self.counts[after], self.evicted[after]

    def update_values(self) -> None:
        """Compute `values`. O(classes * NUM_AGES ** 2)."""
        rates = [0.0] * NUM_AGES
        shares = [0.0] * NUM_AGES  # of the blocks at the start of an age, those that return in it
        common = [0.0] * NUM_AGES
        for age in range(NUM_AGES):
            prior = self.prior_blocks * self.widths[age]
            returned, exposure = 0.0, 0.0
            for kind in range(self.num_classes):
                returned += self.num_returned[kind * NUM_AGES + age]
                exposure += self.exposures[kind * NUM_AGES + age]
            guess = _PRIOR_RATE / (self.bounds[age] + self.widths[age] / 2)
            common[age] = (returned + guess * prior) / (exposure + prior)
        for kind in range(self.num_classes):
            for age in range(NUM_AGES):
                prior = self.prior_blocks * self.widths[age]
                place = kind * NUM_AGES + age
                rates[age] = (self.num_returned[place] + common[age] * prior) / (
                    self.exposures[place] + prior
                )
                shares[age] = -expm1(-rates[age] * self.widths[age])
            for age in range(NUM_AGES):
                self.values[kind * NUM_AGES + age] = self._find_value(rates, shares, age)

    def read_value(self, place: int, seconds: float) -> float:
        """Return the value of a class at an exact age, from those of the two nearest ages.

        Args:
            place: index into `values`: the class and the age in which `seconds` is.
        """
        age = place % NUM_AGES
        value = self.values[place]
        offset = (seconds - self.bounds[age]) / self.widths[age] - 0.5
        other = place + 1 if offset > 0.0 else place - 1
        if age == (NUM_AGES - 1 if offset > 0.0 else 0):
            return value
        share = min(abs(offset), 0.5)
        return value * exp(share * log(self.values[other] / value))

    def _find_value(self, rates: list[float], shares: list[float], age: int) -> float:
        """Return the largest share that returns until some age, per block and time until then."""
        left, time, best = 1.0, 0.0, 0.0
        while age < NUM_AGES:
            returned = left * shares[age]
            time += returned / rates[age]
            left -= returned
            best = max(best, (1.0 - left) / time)
            age += 1
        return best
