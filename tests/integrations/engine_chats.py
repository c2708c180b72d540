"""Complete vLLM engines with a real model on a CPU; each serves chats in its own process (marker `engine`).

    python engine_chats.py FOLDER

FOLDER has the file scenarios.json, a list, and gets the model. It is tiny; its random weights make each
answer depend on all K and V before it. Prints as JSON what each engine did. The fields of a scenario:

- `kind`: the kind of model, of `KINDS`
- `level`: of kv_pool in this engine; null for vLLM's own classes
- `chats`: a list of {"start": step, "turns": [...]}. A turn has `tokens`, which follow the conversation so
  far, `max_tokens`, and perhaps `abort`, the number of tokens after which the client aborts it, and
  `options`, the object `kv_pool` of the request. It starts when the turn before it has ended.
- `engine`: options of vLLM's `LLM`, besides those of `ENGINE`
- `in_one_process`: false for vLLM's default, an engine core and a worker in their own processes, whose steps
  and events are not recorded
"""

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ATTENTION = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
# Lfm2Config has other names for what vLLM reads from a published file.
CONVOLUTIONS = {
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"] * 2,
    "conv_dim": 64,
    "block_dim": 64,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
KINDS = {
    "full attention": ATTENTION,
    "windows": ATTENTION | WINDOWS | {"num_hidden_layers": 4},
    "states": ATTENTION | CONVOLUTIONS | {"num_hidden_layers": 4},
}
ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "block_size": 32,  # the CPU kernels require a multiple of it
    "kv_cache_memory_bytes": 1 << 26,
    "enable_prefix_caching": True,
    "disable_hybrid_kv_cache_manager": False,
    "disable_log_stats": False,
    "async_scheduling": False,
}


def make_model(kind, folder):
    """Return the path of the model, which is made at the first call."""
    path = folder / "-".join(["model", *kind.split()])
    if not path.exists():
        torch.manual_seed(0)
        fields = dict(KINDS[kind])
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


class Placeholder:
    """Takes the place of a CUDA stream or event: on a CPU everything is computed in order."""

    def __init__(self, *arguments, **options):
        pass

    def wait_stream(self, stream):
        pass

    def record(self, stream=None):
        pass

    def synchronize(self):
        pass


def allow_asynchronous_scheduling():
    """vLLM's CPU platform disables it, and its model runner then needs streams."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_update_config(vllm_config):
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = staticmethod(check_and_update_config)
    torch.cuda.Event = torch.cuda.Stream = torch.cuda.current_stream = Placeholder
    torch.cuda.stream = nullcontext


def record_steps(scheduler):
    """Return the list to which each step is added, and the publisher that keeps the events."""
    from integrations.made_scheduler import KeptEvents

    steps, schedule = [], scheduler.schedule
    scheduler.kv_event_publisher = KeptEvents()

    def schedule_and_record(*arguments, **options):
        # With asynchronous scheduling: the requests whose last step has no output yet.
        in_flight = [r.request_id for r in scheduler.running if r.num_output_placeholders]
        output = schedule(*arguments, **options)
        more = output.scheduled_cached_reqs
        new = [[r.req_id, r.block_ids, r.num_computed_tokens] for r in output.scheduled_new_reqs]
        steps.append(
            {
                "tokens": output.num_scheduled_tokens,
                "new": new,
                "more": [more.req_ids, more.new_block_ids, more.num_computed_tokens],
                "preempted": sorted(output.preempted_req_ids or ()),
                "finished": sorted(output.finished_req_ids),
                "in_flight": in_flight,
                "usage": scheduler.kv_cache_manager.usage,
            }
        )
        return output

    scheduler.schedule = schedule_and_record
    return steps, scheduler.kv_event_publisher


class Chat:
    """The client's side of a conversation: one request at a time, on an `LLMEngine`."""

    def __init__(self, engine, number, start, turns):
        self.engine = engine
        self.number = number
        self.start = start
        self.turns = turns
        self.num_turns = 0
        self.request_id = None
        self.history = []

    def send(self):
        """Send the next turn."""
        from vllm import SamplingParams

        turn = self.turns[self.num_turns]
        self.history += turn["tokens"]
        self.num_turns += 1
        self.request_id = f"chat {self.number}, turn {self.num_turns}"
        sampling = SamplingParams(
            max_tokens=turn["max_tokens"],
            temperature=0.0,
            logprobs=2,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_pool": turn["options"]} if "options" in turn else None,
        )
        self.engine.add_request(self.request_id, {"prompt_token_ids": self.history}, sampling)

    def receive(self, output):
        """Return True if the turn has ended, perhaps because the client has aborted it."""
        tokens = output.outputs[0].token_ids
        abort = self.turns[self.num_turns - 1].get("abort")
        is_aborted = abort is not None and len(tokens) >= abort and not output.finished
        if is_aborted:
            self.engine.abort_request([self.request_id])
        if output.finished or is_aborted:
            self.history = [*output.prompt_token_ids, *tokens]
            self.request_id = None
        return self.request_id is None


def describe(output):
    (answer,) = output.outputs
    return {
        "tokens": list(answer.token_ids),
        "logprobs": [sorted([token, p.logprob] for token, p in found.items()) for found in answer.logprobs],
        "cached": output.num_cached_tokens,
        "ended": answer.finish_reason or "abort",
    }


def serve(engine, chats):
    """Serve the chats to their end; return what each request got."""
    answers, step = {}, 0
    while chats or engine.has_unfinished_requests():
        for chat in chats:
            if chat.request_id is None and chat.start <= step:
                chat.send()
        by_id = {chat.request_id: chat for chat in chats}
        for output in engine.step() if engine.has_unfinished_requests() else ():
            if by_id[output.request_id].receive(output):
                answers[output.request_id] = describe(output)
        chats = [chat for chat in chats if chat.request_id or chat.num_turns < len(chat.turns)]
        step += 1
    return answers


def read_counters(engine):
    """Return vLLM's metrics of the prefix cache and of preemptions, as users see them."""
    wanted = ("cache_queries", "cache_hits", "preemptions", "cache_hits_by_source")
    found = {}
    for metric in engine.get_metrics():
        if metric.name.endswith(wanted) and hasattr(metric, "value"):
            source = metric.labels.get("source", "")
            found[f"{metric.name} {source}".strip()] = metric.value
    return found


def serve_scenario(folder, scenario):
    """Return what an engine did."""
    from vllm import LLM
    from vllm.config import KVEventsConfig, KVTransferConfig

    os.environ["VLLM_PLUGINS"] = "kv_pool" if scenario["level"] else ""
    os.environ["KV_POOL_VLLM"] = scenario["level"] or ""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not scenario["in_one_process"]))
    options = ENGINE | scenario["engine"]
    if "kv_transfer_config" in options:
        options["kv_transfer_config"] = KVTransferConfig(**options["kv_transfer_config"])
    if options["async_scheduling"]:
        allow_asynchronous_scheduling()
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    llm = LLM(model=make_model(scenario["kind"], folder), kv_events_config=events, **options)
    engine = llm.llm_engine
    chats = [Chat(engine, number, **chat) for number, chat in enumerate(scenario["chats"])]
    seen = {}
    if scenario["in_one_process"]:
        scheduler = engine.engine_core.engine_core.scheduler
        manager = scheduler.kv_cache_manager
        seen["classes"] = [type(part).__module__ for part in (scheduler, manager, manager.block_pool)]
        seen["steps"], kept = record_steps(scheduler)
    seen["answers"] = serve(engine, chats)
    seen["counters"] = read_counters(engine)
    if scenario["in_one_process"]:
        seen["events"] = kept.take()
        seen["free"] = manager.block_pool.get_num_free_blocks()
    engine.engine_core.shutdown()
    return seen


def main():
    from vllm import LLM  # noqa: F401, once for all processes: it takes longer than a small engine

    folder = Path(sys.argv[1])
    seen = []
    for scenario in json.loads((folder / "scenarios.json").read_text()):
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
            seen.append(process.submit(serve_scenario, folder, scenario).result())
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
