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

import torch
from integrations.made_scheduler import make_answer, make_config, make_hasher, make_request, make_scheduler
from integrations.request_options.made_options import OptionsDice
from vllm.config import KVTransferConfig
from vllm.logger import configure_logging
from vllm.plugins import load_general_plugins
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from kv_pool.core import invariants
from kv_pool.integrations.vllm.request_options.engine_options import EngineOptions
from kv_pool.manager.retention.invariants import check_retention

BLOCK_SIZE = 16
NUM_BLOCKS = 100  # more than a request of the maximum length needs, so that pins are allowed
NUM_STEPS = 400


def make_engine(folder, seed, has_connector):
    config = make_config(
        folder,
        max_model_len=1024,
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 256, "async_scheduling": has_connector},
        cache={"block_size": BLOCK_SIZE, "enable_prefix_caching": True},
    )
    if has_connector:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KVPoolConnector",
            kv_role="kv_both",
            kv_connector_module_path="kv_pool.integrations.vllm.connector",
        )
    shape = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**shape)),
        KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=64)),
    ]
    configure_logging(config.logging_config)
    interval = [None, 0, 64][seed % 3]
    return make_scheduler(
        config, groups, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, retention_interval=interval
    )


class Life:
    def __init__(self, folder, seed, has_connector):
        self.rng = random.Random(seed)
        self.dice = OptionsDice(self.rng, 200, 300)
        self.scheduler = make_engine(folder, seed, has_connector)
        manager = self.scheduler.kv_cache_manager
        self.now = 0.0
        manager.set_request_options(EngineOptions(manager.manager, 12, clock=self.tell_time))
        self.depth = 2 if has_connector else 1
        self.hasher = make_hasher(BLOCK_SIZE)
        self.prompts = [[self.rng.randrange(50_000) for _ in range(300)] for _ in range(3)]
        self.number = 0
        self.in_flight = deque()
        self.seen = Counter()

    def tell_time(self):
        return self.now

    def add(self):
        rng = self.rng
        self.number += 1
        prompt = rng.choice(self.prompts)[: rng.randrange(10, 300)]
        if rng.random() < 0.5:
            prompt = prompt + [rng.randrange(50_000) for _ in range(rng.randrange(1, 100))]
        sampling = {"ignore_eos": True, "max_tokens": rng.randrange(1, 60)}
        if rng.random() < 0.6:
            options = {"kv_pool": self.dice.draw()}
            sampling["extra_args"] = options if rng.random() < 0.5 else {"kv_transfer_params": options}
        session_id = rng.choice([None, None, "a", "b"])
        self.scheduler.add_request(
            make_request(str(self.number), prompt, self.hasher, sampling, session_id=session_id)
        )

    def step(self):
        self.now += self.rng.choice([0.001, 0.01])
        output = self.scheduler.schedule()
        self.seen["preempted"] += len(output.preempted_req_ids or ())
        sampled = {}
        for name in output.num_scheduled_tokens:
            request = self.scheduler.requests[name]
            is_prefill = request.num_computed_tokens < request.num_tokens
            sampled[name] = [] if is_prefill else [self.rng.randrange(50_000)]
        self.in_flight.append((output, sampled))
        if len(self.in_flight) >= self.depth:
            self.finish_step()

    def finish_step(self):
        output, sampled = self.in_flight.popleft()
        answered = self.scheduler.update_from_output(output, make_answer(sampled))
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
        assert not retention._directives.promised
        assert self.scheduler.reset_prefix_cache()
        assert retention.num_pins == retention.num_retained == retention.num_sessions == 0
        return {"requests": self.number, "steps": NUM_STEPS, **self.seen}


def main():
    load_general_plugins()
    assert scheduler_module.KVCacheManager.__module__ == "kv_pool.integrations.vllm.manager_classes"
    folder = Path(sys.argv[1])
    print(json.dumps(Life(folder, int(sys.argv[2]), "connector" in sys.argv).run()))


if __name__ == "__main__":
    main()
