"""Timers: which expires next, and when."""

import random

import pytest

from kv_pool.core.deadlines import NEVER, Deadlines, TimedItem


class Named(TimedItem):
    """An object with a timer, and a name for messages of failing tests."""

    def __init__(self, name, changes_at):
        super().__init__(changes_at)
        self.name = name

    def __repr__(self):
        return self.name


def push(deadlines, *endings):
    for ending in endings:
        deadlines.push_at(ending, ending.changes_at)


def end_all(deadlines, now):
    """Handle the due timers, in order."""
    ended = []
    while (ending := deadlines.find_due(now)) is not None:
        ended.append(ending)
        ending.changes_at = NEVER
    return ended


def test_a_pushed_time_takes_effect_once_it_is_set():
    deadlines, ending = Deadlines(), TimedItem(4.0)
    deadlines.push_at(ending, ending.changes_at)
    deadlines.push_at(ending, 2.0)
    assert deadlines.find_due(3.0) is None
    deadlines.push_at(ending, 2.0)
    ending.changes_at = 2.0
    assert end_all(deadlines, 3.0) == [ending]
    deadlines.push_at(ending, NEVER)
    assert end_all(deadlines, 100.0) == []


def test_outdated_entries_are_removed_when_there_are_many():
    deadlines = Deadlines()
    lasting = [TimedItem(1e6 + number) for number in range(10)]
    push(deadlines, *lasting)
    moved = TimedItem(0.0)
    for number in range(10_000):
        moved.changes_at = 1e5 + number
        deadlines.push_at(moved, moved.changes_at)
        assert len(deadlines.entries) <= 66
    assert end_all(deadlines, 1e5 + 9_998) == []
    assert end_all(deadlines, 2e6) == [moved, *lasting]


@pytest.mark.parametrize("seed", range(20))
def test_random_timers_expire_as_in_a_slow_model(seed):
    rng = random.Random(seed)
    deadlines, live, now, num_pushed = Deadlines(), {}, 0.0, 0
    for number in range(1_000):
        match rng.choice(["new", "move", "drop", "look", "look"]):
            case "new":
                ending = Named(f"ending {number}", now + rng.randrange(20))
                num_pushed += 1
                live[ending] = (ending.changes_at, num_pushed)
                deadlines.push_at(ending, ending.changes_at)
            case "move" if live:
                ending = rng.choice(list(live))
                ending.changes_at = now + 20 + rng.randrange(40) + number / 2_000
                num_pushed += 1
                live[ending] = (ending.changes_at, num_pushed)
                deadlines.push_at(ending, ending.changes_at)
            case "drop" if live:
                ending = rng.choice(list(live))
                ending.changes_at = NEVER
                del live[ending]
            case "look":
                now += rng.randrange(4)
                due = sorted((ending for ending in live if live[ending][0] <= now), key=live.get)
                assert end_all(deadlines, now) == due
                for ending in due:
                    del live[ending]
