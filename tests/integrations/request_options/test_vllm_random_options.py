"""Random options under vLLM's real schedulers: nothing stops them, nothing is left over (marker `vllm`)."""

import random
from collections import Counter

import pytest
from integrations.request_options.made_options import OptionsDice
from integrations.scheduler_options import SCHEDULER_KINDS

from kv_pool.core import invariants
from kv_pool.integrations.vllm.request_options.handler import EngineOptions, read_max_pinned_blocks
from kv_pool.manager.retention.invariants import check_retention

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_warnings")]

NUM_STEPS = 150


class CountedOptions(EngineOptions):
    """Counts the fields of reports."""

    seen: Counter

    def report_end(self, request):
        report = super().report_end(request)
        self.seen.update(f"report {field}" for field in report or ())
        return report


def make_side(engine, seed, seen):
    """Return a scheduler with our manager, whose requests have options; None if vLLM serves its own."""
    from integrations.scheduler_side import SchedulerSide, manager_classes

    class OptionsSide(SchedulerSide):
        now = 0.0
        rng = random.Random(seed)
        dice = OptionsDice(rng, engine.options["max_model_len"], 300)

        def add(self, request_id, tokens, sampling, options):
            if self.rng.random() < 0.6:
                given, sent = sampling.get("extra_args", {}), self.dice.draw()
                if self.rng.random() < 0.5:
                    given = given | {"kv_pool": sent}
                else:
                    params = given.get("kv_transfer_params", {}) | {"kv_pool": sent}
                    given = given | {"kv_transfer_params": params}
                sampling = sampling | {"extra_args": given}
            session_id = self.rng.choice([None, None, "a", "b"])
            super().add(request_id, tokens, sampling, {**options, "session_id": session_id})

        def schedule(self):
            self.now += self.rng.choice([0.001, 0.01])
            answer = super().schedule()
            seen["preempted"] += len(answer["preempted_req_ids"] or ())
            return answer

        def check(self):
            invariants.check(self.manager.block_pool)
            retention = self.manager.manager.retention
            if retention is not None:
                check_retention(retention)
                seen["pinned"] += retention.num_pinned
                seen["sessions"] += retention.num_sessions
                seen["retained"] += retention.num_retained
            assert self.manager.request_options.by_request.keys() <= self.scheduler.requests.keys()

        def check_end(self):
            self.check()
            assert not self.manager.request_options.by_request
            retention = self.manager.manager.retention
            assert self.scheduler.reset_prefix_cache()
            if retention is not None:
                assert not retention._ranges
                assert not retention._promised
                assert retention.num_pins == retention.num_retained == retention.num_sessions == 0
            assert self.find_leaks() == []

    side = OptionsSide(engine.options, manager_classes())
    if not type(side.manager).__module__.startswith("kv_pool"):
        return None
    limit = read_max_pinned_blocks(side.manager.manager)
    options = CountedOptions(side.manager.manager, limit, clock=lambda: side.now)
    options.seen = seen
    side.manager.set_request_options(options)
    return side


def test_random_options_under_the_scheduler(monkeypatch):
    import vllm
    from integrations.scheduler_comparison import next_operation
    from integrations.scheduler_schedule import SchedulerSchedule

    from kv_pool.integrations.vllm.releases import find_release

    monkeypatch.setenv("KV_POOL_VLLM_MAX_PINNED_BLOCKS", "12")
    seen = Counter()
    for kind in SCHEDULER_KINDS:
        for seed in range(2):
            print(kind, seed)
            schedule = SchedulerSchedule(kind, seed, find_release(vllm.__version__))
            side = make_side(schedule, seed, seen)
            decisions = schedule.decide(NUM_STEPS)
            operation = None if side is None else next(decisions)
            while operation is not None:
                answer = side.apply(operation)
                side.check()
                operation = next_operation(decisions, answer)
            if side is not None:
                side.check_end()
    expected = ["preempted", "pinned", "sessions", "retained"]
    fields = ["retained_tokens", "expires_in_ms", "changed_blocks", "ended_session", "refused"]
    expected += [f"report {field}" for field in fields]
    assert {name: seen[name] for name in expected if not seen[name]} == {}
