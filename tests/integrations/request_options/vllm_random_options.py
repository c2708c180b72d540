"""Random requests with options under vLLM's scheduler; prints what happened as JSON.

    VLLM_PLUGINS=kv_pool KV_POOL_VLLM=manager python vllm_random_options.py FOLDER SEED [connector]

With `connector` the scheduler is the asynchronous one: a step is scheduled while the one before it runs,
blocks are freed later, and reports are returned. The numbered invariants are checked after each step.
"""

import json
import random
import sys
from collections import Counter, deque
from pathlib import Path

import vllm_schedule
from vllm.config import KVTransferConfig
from vllm.plugins import load_general_plugins
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

NUM_STEPS = 400
INVALID = [{"priority": 1}, {"change": []}, "{", {"session": {"duration_ms": -1}}, 7]


def make_range(rng, **fields):
    one = dict(fields)
    if rng.random() < 0.5:
        one["token_start"] = rng.randrange(200)
    if rng.random() < 0.7:
        one["token_end"] = one.get("token_start", 0) + rng.randrange(1, 200)
    return one


def make_retention(rng):
    if rng.random() < 0.4:
        start = rng.randrange(100)
        end = start + rng.choice([1, 30, 60, 4000])
        return {"token_start": start, "token_end": end, "duration_ms": rng.choice([1, 20, 300]), "pin": True}
    one = make_range(rng, priority=rng.choice([0, 10, 36, 80, 100]))
    return {**one, "duration_ms": rng.choice([1, 20, 300])} if rng.random() < 0.6 else one


def make_options(rng):
    if rng.random() < 0.15:
        return rng.choice(INVALID)
    value = {}
    if rng.random() < 0.7:
        value["token_range_retention_configs"] = [make_retention(rng) for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.2:
        value["decode_retention_priority"] = rng.choice([0, 50])
    if rng.random() < 0.4:
        value["session"] = {"id": rng.choice("ab"), "duration_ms": rng.choice([1, 20, 300])}
    if rng.random() < 0.3:
        value["change"] = [make_retention(rng)]
    for field in ("demote", "release"):
        if rng.random() < 0.2:
            value[field] = rng.choice([True, [make_range(rng)]])
    if rng.random() < 0.2:
        value["end_session"] = rng.choice("ab")
    return value


class Life:
    def __init__(self, folder, seed, has_connector):
        self.rng = random.Random(seed)
        vllm_schedule.NUM_BLOCKS = (
            100  # more than a request of the maximum length needs, so that pins are allowed
        )
        if has_connector:
            vllm_schedule.Scheduler = async_scheduler.AsyncScheduler
            vllm_schedule.VllmConfig = make_connector_config
        self.scheduler = vllm_schedule.make_scheduler(folder)
        self.depth = 2 if has_connector else 1
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(vllm_schedule.BLOCK_SIZE, sha256)
        self.prompts = [[self.rng.randrange(50_000) for _ in range(300)] for _ in range(3)]
        self.number = 0
        self.in_flight = deque()
        self.seen = Counter()

    def add(self):
        rng = self.rng
        self.number += 1
        prompt = rng.choice(self.prompts)[: rng.randrange(10, 300)]
        if rng.random() < 0.5:
            prompt = prompt + [rng.randrange(50_000) for _ in range(rng.randrange(1, 100))]
        sampling = SamplingParams(ignore_eos=True, max_tokens=rng.randrange(1, 60))
        if rng.random() < 0.6:
            options = make_options(rng)
            if rng.random() < 0.5:
                sampling.extra_args = {"kv_transfer_params": {"kv_pool": options}}
            else:
                sampling.extra_args = {"kv_pool": options}
        sampling.update_from_generation_config({}, 1)
        self.scheduler.add_request(
            Request(
                request_id=str(self.number),
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=self.hasher,
                session_id=rng.choice([None, None, "a", "b"]),
            )
        )

    def step(self):
        output = self.scheduler.schedule()
        self.seen["preempted"] += len(output.preempted_req_ids or ())
        names = list(output.num_scheduled_tokens)
        tokens = []
        for name in names:
            request = self.scheduler.requests[name]
            is_prefill = request.num_computed_tokens < request.num_tokens
            tokens.append([] if is_prefill else [self.rng.randrange(50_000)])
        self.in_flight.append((output, names, tokens))
        if len(self.in_flight) >= self.depth:
            self.finish_step()

    def finish_step(self):
        output, names, tokens = self.in_flight.popleft()
        answered = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=tokens,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        for outputs in answered.values():
            for one in outputs.outputs:
                report = (one.kv_transfer_params or {}).get("kv_pool")
                if report is not None:
                    json.dumps(report)
                    self.seen.update(f"report {field}" for field in report)

    def abort(self):
        name = self.rng.choice(list(self.scheduler.requests))
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.seen["aborted"] += 1

    def check(self):
        from kv_pool.core import invariants
        from kv_pool.manager.retention.invariants import check_retention

        manager = self.scheduler.kv_cache_manager
        invariants.check(manager.block_pool)
        retention = manager.manager.retention
        if retention is not None:
            check_retention(retention)
            self.seen["pinned"] += retention.num_pinned
            self.seen["sessions"] += retention.num_sessions
            self.seen["retained"] += retention.num_retained
        assert manager.request_options.by_request.keys() <= self.scheduler.requests.keys()

    def run(self):
        for number in range(NUM_STEPS):
            for _ in range(self.rng.choice([0, 0, 1, 1, 2])):
                self.add()
            if self.rng.random() < 0.1 and self.scheduler.requests:
                self.abort()
            self.step()
            if number % 5 == 0:
                self.check()
        while self.scheduler.has_unfinished_requests():
            self.step()
        while self.in_flight:
            self.finish_step()
        self.scheduler.schedule()  # frees what waited for the last step
        self.check()
        manager = self.scheduler.kv_cache_manager
        assert not manager.request_options.by_request
        retention = manager.manager.retention
        assert not retention._directives.by_request
        assert not retention._pins.promised
        assert self.scheduler.reset_prefix_cache()
        assert retention.num_pins == retention.num_retained == retention.num_sessions == 0
        return {"requests": self.number, "steps": NUM_STEPS, **self.seen}


def make_connector_config(**fields):
    from vllm.config import VllmConfig

    fields["scheduler_config"].async_scheduling = True
    transfer = KVTransferConfig(
        kv_connector="KVPoolConnector",
        kv_role="kv_both",
        kv_connector_module_path="kv_pool.integrations.vllm.connector",
    )
    return VllmConfig(**fields, kv_transfer_config=transfer)


def main():
    load_general_plugins()
    assert scheduler.KVCacheManager.__module__ == "kv_pool.integrations.vllm.manager_classes"
    folder = Path(sys.argv[1])
    print(json.dumps(Life(folder, int(sys.argv[2]), "connector" in sys.argv).run()))


if __name__ == "__main__":
    main()
