"""Random engines over vLLM's scheduler: the same steps with kv_pool's classes as with vLLM's (marker `vllm`).

`scheduler_comparison` says what is compared, `scheduler_options` and `scheduler_schedule` what is excluded.
"""

from collections import Counter

import pytest
from integrations.scheduler_options import SCHEDULER_KINDS

from kv_pool.integrations.vllm.releases import find_release

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_warnings")]

NUM_STEPS = 200
FEW_SEEDS = 3


def compare(kind, seeds, names, num_steps=NUM_STEPS, note=None):
    from integrations.scheduler_comparison import Comparison

    for seed in seeds:
        difference = Comparison(kind, seed, names, num_steps, note).difference
        if difference:
            pytest.fail("\n".join([f"{kind}, seed {seed}", *difference]))


def classes_of(level):
    from integrations.scheduler_side import LEVELS

    return LEVELS[level]()


@pytest.mark.parametrize("kind", SCHEDULER_KINDS)
@pytest.mark.parametrize("level", ["pool", "manager"])
def test_scheduler_takes_the_same_steps(level, kind):
    compare(kind, range(FEW_SEEDS), classes_of(level))


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("full + mamba, finer hashes", 34),  # the hash of a prompt's end comes late
        ("full + mamba, finer hashes", 36),  # states that vLLM caches under the hash of earlier tokens
        ("full + mamba, finer hashes", 93),
        ("mamba", 50635),  # states of rejected drafts beside a watermark
    ],
)
def test_engines_that_once_differed_take_the_same_steps(kind, seed):
    compare(kind, [seed], classes_of("manager"))


def test_drafter_of_several_modules_over_states_is_left_to_vllm():
    """Unless its group is marked, as vLLM does: then no state is cached under the hash of earlier tokens."""
    import vllm
    from integrations.scheduler_schedule import SchedulerSchedule
    from integrations.scheduler_side import SchedulerSide
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    release = find_release(vllm.__version__)
    options = SchedulerSchedule("full + mamba, finer hashes", 36, release).options
    options["spec"]["method"] = "mtp"
    assert isinstance(SchedulerSide(options, classes_of("manager")).manager, KVCacheManager)
    options["groups"][0]["is_eagle_group"] = True
    assert not isinstance(SchedulerSide(options, classes_of("manager")).manager, KVCacheManager)


def test_two_schedulers_of_vllm_take_the_same_steps():
    """Also shows that the engines reach what they are to compare."""
    seen = Counter()

    def note(operation, answer):
        seen[operation[0]] += 1
        if operation[0] == "update":
            seen["event"] += len(answer["events"])
            seen["finished"] += sum(len(outputs["outputs"]) for outputs in answer["outputs"].values())
            seen["failed load"] += bool(operation[2] and operation[2].get("invalid_block_ids"))
        for call, *_ in answer.get("connector", ()) if isinstance(answer, dict) else ():
            seen[call] += 1
        if operation[0] == "schedule":
            seen["hit"] += any(new["num_computed_tokens"] for new in answer["scheduled_new_reqs"])
            seen["preemption"] += bool(answer["preempted_req_ids"])
            seen["drafts"] += bool(answer["scheduled_spec_decode_tokens"])
            seen["image"] += bool(answer["scheduled_encoder_inputs"])
            seen["copy"] += bool(answer["kv_cache_block_copies"])
            seen["zeroed block"] += bool(answer["new_block_ids_to_zero"])

    for kind in SCHEDULER_KINDS:
        compare(kind, range(2), classes_of("vllm"), 60, note)
    expected = ["add", "schedule", "update", "abort", "reset", "compile_grammar", "event", "finished", "hit"]
    expected += ["preemption", "drafts", "image", "copy", "zeroed block", "match", "load", "send", "finish"]
    assert {name: seen[name] for name in expected if not seen[name]} == {}


def test_async_scheduling_uses_the_async_scheduler():
    """vLLM disables it on machines without an accelerator; the comparisons need it."""
    import vllm
    from integrations.scheduler_schedule import SchedulerSchedule
    from integrations.scheduler_side import SchedulerSide
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    seen = set()
    for seed in range(8):
        schedule = SchedulerSchedule("full", seed, find_release(vllm.__version__))
        scheduler = SchedulerSide(schedule.options, classes_of("vllm")).scheduler
        assert isinstance(scheduler, AsyncScheduler) is schedule.is_async
        seen.add(schedule.is_async)
    assert seen == {True, False}
