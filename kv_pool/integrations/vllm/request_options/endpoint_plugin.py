"""`OptionsEndpoints`: the plugin of vLLM's API server that installs `OptionsCheck`. Imports no vLLM."""

from typing import Any

from kv_pool.integrations.vllm.request_options.http_check import OptionsCheck


class OptionsEndpoints:
    """An endpoint plugin of vLLM; loaded if `VLLM_PLUGINS` names `kv_pool`. It adds no routes."""

    name = "kv_pool"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Install the check of `kv_pool` objects."""
        app.add_middleware(OptionsCheck)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep no state."""
