"""`RequestHandler`: an object that follows the requests of an engine through the connector."""

from __future__ import annotations

from typing import Any, Protocol


class RequestHandler(Protocol):
    """Follows each request from its arrival to its end, in the scheduler's process.

    The connector calls it with or without tiers. A request is vLLM's `Request`; what a client sends is in
    `request.kv_transfer_params["kv_pool"]`, any JSON. Methods must not raise: an error here would stop the
    engine.
    """

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Receive the scheduler's manager; `manager.block_pool` is its pool. Called once, before requests."""

    def on_new_request(self, request: Any) -> None:
        """Receive a request that was added to the scheduler; it has no blocks yet."""

    def request_finished(self, request: Any) -> dict[str, Any] | None:
        """Receive a finished request, before its blocks are freed.

        Returns:
            Entries for the answer's `kv_transfer_params`, or None.
        """
