"""`ReturnTimes`: how soon freed blocks are used again, by class and age, and what keeping them is worth."""

from math import exp, expm1, log
from typing import Final

from mypy_extensions import i64

NUM_AGES: Final = 13
NUM_COHORTS: Final = 48

_FIRST_AGE: Final = 1 / 64
_HALF_LIFE: Final = 8.0  # in scales
_PRIOR_RATE: Final = 0.1  # returns per block and age, before any is seen


class _Cohort:
    """Blocks that entered one after the other, and of these the ones that have not left.

    Attributes:
        start: number of blocks that entered before.
        time: when the first of them entered.
        total, num_evicted: those that have not left, in all, and the evicted ones of them.
        counts: those that have not left, by class.
    """

    def __init__(self, start: i64, time: float, num_classes: int) -> None:
        self.start: i64 = start
        self.time: float = time
        self.total: i64 = 0
        self.num_evicted: i64 = 0
        self.counts: list[int] = [0] * num_classes


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
        self.cohorts: list[_Cohort] = []  # oldest first

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
        if not self.cohorts or self.num_entered - self.cohorts[-1].start >= self.cohort_blocks:
            self._add_cohort(now)
        cohort = self.cohorts[-1]
        cohort.total += num_blocks
        cohort.counts[kind] = cohort.counts[kind] + num_blocks  # compiled code adds in place as Python does
        self.num_entered += num_blocks
        return self.num_entered

    def note_evicted(self, stamp: int, num_blocks: int) -> None:
        """Handle the eviction of blocks. O(NUM_COHORTS)."""
        self.cohorts[self._find_cohort(stamp)].num_evicted += num_blocks

    def count_recent(self, num_blocks: int) -> tuple[int, int]:
        """Return the stamp of the last `num_blocks` blocks that have not left, and how many are evicted.

        Of whole cohorts; the stamp is that of the blocks that entered before them. O(NUM_COHORTS).
        """
        num_evicted = 0
        end = self.num_entered
        for cohort in reversed(self.cohorts):
            num_blocks -= cohort.total
            if num_blocks < 0:
                return end, num_evicted
            num_evicted += cohort.num_evicted
            end = cohort.start
        return 0, num_evicted

    def _find_cohort(self, stamp: i64) -> i64:
        cohorts = self.cohorts  # the last ones are asked for most
        place: i64 = len(cohorts) - 1
        while place > 0 and cohorts[place].start >= stamp:
            place -= 1
        return place

    def leave(self, stamp: int, kind: int, num_blocks: int, is_evicted: bool = False) -> int:
        """Handle blocks that return or are forgotten. Return the number of blocks that entered after them.

        Blocks that have left again are not counted. O(NUM_COHORTS).
        """
        cohorts = self.cohorts
        place = self._find_cohort(stamp)
        cohort = cohorts[place]
        if is_evicted:
            cohort.num_evicted -= num_blocks
        cohort.total -= num_blocks
        cohort.counts[kind] = cohort.counts[kind] - num_blocks
        num_after = cohort.total // 2
        num_cohorts: i64 = len(cohorts)
        while place + 1 < num_cohorts:
            place += 1
            num_after += cohorts[place].total
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
        if len(self.cohorts) >= NUM_COHORTS:
            self._merge()
        self.cohorts.append(_Cohort(self.num_entered, now, self.num_classes))

    def _count_time(self, now: float) -> None:
        seconds = now - self.time
        share = 0.5 ** (seconds / (_HALF_LIFE * self.scale))
        for place in range(len(self.exposures)):
            self.exposures[place] *= share
            self.num_returned[place] *= share
        middle = self.time + seconds / 2
        for place, cohort in enumerate(self.cohorts):
            if cohort.total > 0:
                is_last = place + 1 == len(self.cohorts)  # it has entered in this time, half of it on average
                end = self.time if is_last else self.cohorts[place + 1].time
                age = self.find_age(middle - (cohort.time + end) / 2)
                for kind, count in enumerate(cohort.counts):
                    if count == 0:
                        continue
                    self.exposures[kind * NUM_AGES + age] += count * (seconds / 2 if is_last else seconds)

    def _merge(self) -> None:
        """Merge the two neighbouring cohorts that are shortest for their age; not the last ones."""
        cohorts = self.cohorts
        num_entered: i64 = self.num_entered
        best = 2.0
        place: i64 = 0
        first: i64 = 0
        while first + 3 < len(cohorts):
            start = cohorts[first].start
            ratio = float(cohorts[first + 2].start - start) / float(num_entered - start)
            if ratio < best:
                best, place = ratio, first
            first += 1
        cohort, after = cohorts[place], cohorts.pop(place + 1)
        cohort.total += after.total
        cohort.num_evicted += after.num_evicted
        for kind, count in enumerate(after.counts):
            cohort.counts[kind] = cohort.counts[kind] + count

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
