"""`CheckedWorker`: a worker process of vLLM with a `CheckedModel`, for `worker_cls`."""

import gc
import threading

from integrations.vllm_connector.checked_model import ANSWERS, CheckedModel
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.v1.core import block_pool, kv_cache_manager
from vllm.v1.worker.worker_base import WorkerBase

import kv_pool


class CheckedWorker(WorkerBase):
    """A rank of an engine; vLLM starts its process, loads the plugins in it and sends it the steps."""

    def init_device(self):
        parallel = self.parallel_config
        init_distributed_environment(
            parallel.world_size, self.rank, self.distributed_init_method, self.local_rank, backend="gloo"
        )
        ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)

    def load_model(self, *, load_dummy_weights=False):
        pass

    def get_kv_cache_spec(self):
        return ANSWERS["get_kv_cache_spec"]

    def get_supported_kv_cache_layouts(self):
        return ANSWERS["get_supported_kv_cache_layouts"]

    def determine_available_memory(self):
        return ANSWERS["determine_available_memory"]

    def compile_or_warm_up_model(self):
        return ANSWERS["compile_or_warm_up_model"]

    def get_supported_tasks(self):
        return ANSWERS["get_supported_tasks"]

    def initialize_from_config(self, cache_config):
        self.model = CheckedModel(self.vllm_config, cache_config, self.rank)

    def get_kv_connector_handshake_metadata(self):
        return None

    def execute_model(self, output):
        return self.model.execute(output)

    def describe_kv_pool(self):
        """Return the classes of vLLM's names, and what of kv_pool this process has."""
        return {
            "classes": [block_pool.BlockPool.__module__, kv_cache_manager.KVCacheManager.__module__],
            "pools": sum(issubclass(type(thing), kv_pool.BlockPool) for thing in gc.get_objects()),
            "threads": sorted(thread.name for thread in threading.enumerate() if "kv_pool" in thread.name),
        }

    def shutdown(self):
        self.model.rank.connector.shutdown()
