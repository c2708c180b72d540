"""`SchedulerSide`: vLLM's scheduler over one KV cache manager, driven by operations; and its state as data.

Importing this needs an importable vLLM of a release in `releases`. `LEVELS` has the classes of a manager: the
names to rebind in vLLM's modules while the scheduler is created.
"""

import contextlib
import dataclasses
import enum
import functools
import importlib
import tempfile
import types
import warnings
from pathlib import Path
from typing import ClassVar

from core.plain_operations import Side, hex_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # for vLLM's imports
    import msgspec
    from core.vllm_classes import BlockPool
    from integrations.made_scheduler import (
        KeptEvents,
        make_answer,
        make_config,
        make_hasher,
        make_request,
        make_scheduler,
    )
    from manager.manager_operations import ids_of
    from manager.vllm_manager import make_spec
    from vllm.config import KVTransferConfig, SpeculativeConfig
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput
    from vllm.v1.request import RequestStatus

from kv_pool.integrations.vllm.releases import load_classes

SCHEDULER = "vllm.v1.core.sched.scheduler"
COORDINATOR = "vllm.v1.core.kv_cache_coordinator"

# Not comparable, or the scheduler passes them on as they are.
LEFT_OUT = {"timestamp", "sampling_params", "pooling_params", "mm_features", "lora_request"}


def own_classes():
    return {COORDINATOR: {"BlockPool": BlockPool}}


def pool_classes():
    ours = load_classes("pool")
    return {
        COORDINATOR: {"BlockPool": ours["BlockPool"]},
        SCHEDULER: {"KVCacheMetricsCollector": ours["KVCacheMetricsCollector"]},
    }


def manager_classes():
    names = pool_classes()
    ours = load_classes("manager")
    names[SCHEDULER]["KVCacheManager"] = ours["KVCacheManager"]
    return names


LEVELS = {"vllm": own_classes, "pool": pool_classes, "manager": manager_classes}


@contextlib.contextmanager
def rebound(names):
    """Bind names of modules to other classes for a while; `names` has the classes by module and name."""
    old = []
    for module_name, classes in names.items():
        module = importlib.import_module(module_name)
        for name, new in classes.items():
            old.append((module, name, getattr(module, name)))
            setattr(module, name, new)
    try:
        yield
    finally:
        for module, name, value in reversed(old):
            setattr(module, name, value)


@functools.cache
def make_folder():
    return tempfile.TemporaryDirectory()


class EveryToken:
    """A grammar that accepts every token except one in a draft."""

    def accept_tokens(self, request_id, tokens):
        return True

    def validate_tokens(self, tokens):
        return tokens[: tokens.index(2)] if 2 in tokens else tokens


class SchedulerSide(Side):
    EXPECTED_ERRORS: ClassVar = {"reset": (RuntimeError,)}

    def __init__(self, options, names):
        """`names` has the classes to use, as for `rebound`."""
        super().__init__(None)
        self.options = options
        self.requests = {}
        self.outputs = []  # scheduled steps whose answer is missing
        self.config = self.make_config()
        groups = [self.make_group(number, dict(group)) for number, group in enumerate(options["groups"])]
        with rebound(names):
            self.scheduler = make_scheduler(
                self.config,
                groups,
                num_blocks=options["num_blocks"],
                block_size=options["block_size"],
                hash_block_size=options["hash_block_size"],
                retention_interval=options["retention_interval"],
            )
        self.scheduler.use_v2_model_runner = options["has_v2_runner"]
        self.set_encoder(options["encoder_budget"])
        self.scheduler.kv_event_publisher = self.events = KeptEvents()
        self.manager = self.scheduler.kv_cache_manager
        num_ahead = getattr(self.config, "num_hash_lookahead_tokens", 0)  # unknown until vLLM 0.32
        self.hasher = make_hasher(options["hash_block_size"], options["algorithm"], num_ahead)

    def make_config(self):
        options = self.options
        config = make_config(
            Path(make_folder().name),
            max_model_len=options["max_model_len"],
            scheduler=options["scheduler"],
            cache={"block_size": options["block_size"], **options["cache"]},
            events=options["events"],
            metrics=options["metrics"],
        )
        spec, connector = options["spec"], options["connector"]
        if spec is not None:
            num_drafts = spec["num_speculative_tokens"]
            config.speculative_config = SpeculativeConfig(model="ngram", num_speculative_tokens=num_drafts)
            for name, value in spec.items():
                setattr(config.speculative_config, name, value)
            config.speculative_config.draft_model_config = types.SimpleNamespace(
                hf_config=types.SimpleNamespace(num_nextn_predict_layers=num_drafts)
            )
        if connector is not None:
            config.kv_transfer_config = KVTransferConfig(
                kv_connector="MadeConnector",
                kv_connector_module_path="integrations.made_connector",
                kv_role=connector["role"],
                kv_load_failure_policy=connector["on_failure"],
                kv_connector_extra_config=connector,
            )
        return config

    def make_group(self, number, group):
        is_eagle_group = group.pop("is_eagle_group", False)
        return KVCacheGroupSpec([f"layer {number}"], make_spec(group), is_eagle_group=is_eagle_group)

    def set_encoder(self, budget):
        """Give the scheduler an encoder, which it would read from a multimodal model's files."""
        is_encoder_decoder = self.options["is_encoder_decoder"]
        self.scheduler.is_encoder_decoder = is_encoder_decoder
        self.scheduler.max_num_encoder_input_tokens = budget
        manager = EncoderDecoderCacheManager if is_encoder_decoder else EncoderCacheManager
        self.scheduler.encoder_cache_manager = manager(cache_size=2 * budget)

    # ---- operations ----------------------------------------------------------------------------

    def add(self, request_id, tokens, sampling, options):
        """Add a request. A position of an image is [offset, length, name]."""
        options = dict(options)
        positions = options.pop("images", [])
        lora = options.pop("lora", 0)
        if options.pop("is_structured", False):
            sampling = {**sampling, "structured_outputs": StructuredOutputsParams(regex=".*")}
        self.requests[request_id] = request = make_request(
            request_id,
            list(tokens),
            self.hasher,
            sampling,
            mm_features=[
                MultiModalFeatureSpec(
                    data=MultiModalKwargsItem.dummy(),
                    mm_position=PlaceholderRange(offset=offset, length=length),
                    identifier=name,
                    modality="image",
                )
                for offset, length, name in positions
            ],
            lora_request=LoRARequest(f"lora {lora}", lora, "none") if lora else None,
            **options,
        )
        self.scheduler.add_request(request)

    def stream(self, request_id, tokens, sampling):
        """Add input to a session; without tokens, end it. Return whether it still exists."""
        request = make_request(request_id, list(tokens), None, sampling, resumable=bool(tokens))
        self.scheduler.add_request(request)
        return request_id in self.scheduler.requests

    def compile_grammar(self, request_id):
        self.requests[request_id].structured_output_request.grammar = EveryToken()

    def schedule(self):
        """Return the scheduler's output, and the requests that sample at its end."""
        output = self.scheduler.schedule()
        self.outputs.append(output)
        answer = plain(output)
        answer["samples"] = [
            name for name in output.num_scheduled_tokens if not self.scheduler.requests[name].is_prefill_chunk
        ]
        if self.scheduler.connector is not None:
            answer["connector"] = plain(self.scheduler.connector.take_log())
        return answer

    def update(self, sampled, transfers, drafts):
        """Answer the oldest step without an answer. Return the outputs to the clients, and events."""
        output = self.outputs.pop(0)
        options = {}
        if transfers is not None:
            options["kv_connector_output"] = KVConnectorOutput(
                **{name: set(values) for name, values in transfers.items()}
            )
        answer = make_answer({name: list(tokens) for name, tokens in sampled.items()}, **options)
        outputs = self.scheduler.update_from_output(output, answer)
        if drafts:
            tokens = [list(draft) for draft in drafts.values()]
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), tokens))
        told = {"outputs": plain(outputs), "events": self.events.take()}
        if self.scheduler.connector is not None:
            told["connector"] = plain(self.scheduler.connector.take_log())
        return told

    def abort(self, request_id):
        """Abort one request; None aborts all."""
        aborted = self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        return [request.request_id for request in aborted]

    def reset(self, reset_running_requests):
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    # ---- visible state -------------------------------------------------------------------------

    def picture(self):
        pool = self.manager.block_pool
        return {
            "requests": {
                name: [
                    request.status.name,
                    request.num_computed_tokens,
                    request.num_preemptions,
                    request.shared_prefix_boundary,
                ]
                for name, request in self.scheduler.requests.items()
            },
            "tables": {name: self.manager.get_block_ids(name) for name in self.scheduler.requests},
            "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
            "num_free": pool.get_num_free_blocks(),
            "usage": self.manager.usage,
            "cached": {
                hex_of(key): sorted(ids_of(stored))
                for key, stored in pool.cached_block_hash_to_block._cache.items()
            },
        }

    def find_leaks(self):
        """Return what is left of the requests, when all have ended: [] if nothing."""
        pool = self.manager.block_pool
        leaks = [f"request {name}" for name in self.scheduler.requests]
        num_lost = self.options["num_blocks"] - 1 - pool.get_num_free_blocks()
        if num_lost:
            leaks.append(f"{num_lost} blocks are not free")
        if self.manager.usage != 0:
            leaks.append(f"usage is {self.manager.usage}")
        if not self.manager.reset_prefix_cache():
            leaks.append("the prefix cache cannot be reset")
        return leaks


def plain(value):
    """Return a value of vLLM's interface as plain data; sets are sorted."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    elif isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    else:
        return type(value).__name__
    return {name: plain(getattr(value, name)) for name in names if name not in LEFT_OUT}
