"""`keep_start_method`: lets processes of vLLM be forked on a machine without GPU, as they are with one."""

import os


def keep_start_method():
    """Keep VLLM_WORKER_MULTIPROC_METHOD as it is; vLLM's CPU platform sets it to spawn."""
    from vllm.platforms import current_platform

    method = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_update_config(vllm_config):
        check(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method

    platform.check_and_update_config = staticmethod(check_and_update_config)
