"""`EngineOptions`: the `kv_pool` objects of the requests of one vLLM engine. Imports no vLLM."""

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from kv_pool.environment import MAX_PINNED_BLOCKS
from kv_pool.errors import InvalidArgumentError
from kv_pool.events.event_publisher import is_worth_logging
from kv_pool.ids import RequestId
from kv_pool.integrations.vllm.request_options.handler import OpenOptions, RequestOptionsHandler
from kv_pool.integrations.vllm.request_options.options import (
    ABSENT,
    NO_MANAGER,
    find_options,
    list_places,
    warn_of_unread_options,
)
from kv_pool.manager.kv_cache_manager import KVCacheManager

logger = logging.getLogger("vllm.kv_pool")


class EngineOptions:
    """Finds the options of vLLM's requests and applies them; at level `manager` only.

    The manager and a connector call the same methods; each may come first. No method raises an error, which
    would stop the engine.

    Args:
        manager: the manager under vLLM's scheduler.
        max_pinned_blocks: see `read_max_pinned_blocks`.
        clock: as for `BlockRetention`.

    Attributes:
        by_request: the options of requests that have not ended; live.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        max_pinned_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handler = RequestOptionsHandler(manager, clock, max_pinned_blocks, on_refused=self._log_refusal)
        self._num_refused = 0
        self._place = ""  # of the options that are being read
        self.by_request: dict[RequestId, OpenOptions] = self._handler.by_request

    def note_request(self, request: Any) -> None:
        """Read and apply the options of a request, unless that has been done."""
        if request.request_id in self.by_request or request.sampling_params is None:
            return
        try:
            places = list_places(request.sampling_params.extra_args)
            self._place = next(iter(places), "")
            value = find_options(places)
            if value is not ABSENT:
                self._handler.receive(request, value)
        except InvalidArgumentError as error:
            self._handler.refuse(request, str(error))
        except Exception:
            logger.exception("kv_pool could not apply the options of request %s", request.request_id)
        self._place = ""

    def note_end(self, request: Any) -> dict[str, Any] | None:
        """Apply what the end of a request starts, and return its report; None without options.

        Call it before the request's blocks are freed.
        """
        try:
            report = self._handler.note_end(request)
        except Exception:
            logger.exception("kv_pool could not apply the options of request %s", request.request_id)
            return None
        return None if report is None else report.to_json()

    def note_leaving(self, request: Any) -> None:
        """Record that a request with options is about to free its blocks: it has ended or is preempted."""
        if request.is_finished():
            self.note_end(request)
        else:
            self._handler.note_preempted(request)

    def note_left(self, request: Any) -> None:
        """Record that the request has freed its blocks."""
        try:
            self._handler.note_freed(request, will_return=not request.is_finished())
        except Exception:
            logger.exception("kv_pool could not end the options of request %s", request.request_id)

    def _log_refusal(self, request_id: RequestId, reason: str) -> None:
        self._num_refused += 1
        if is_worth_logging(self._num_refused):
            logger.warning(
                "kv_pool refuses the options of request %s%s: %s (%d requests with refused options so far)",
                request_id,
                f" in {self._place}" if self._place else "",
                reason.removeprefix("kv_pool: "),
                self._num_refused,
            )


def note_arrival(manager: Any, request: Any) -> None:
    """Apply the options of a request that a KV connector sees, by the `request_options` of the manager.

    vLLM's own manager has none: then warn that options are not read.
    """
    options = getattr(manager, "request_options", None)
    if options is None:
        warn_of_unread_options(request)
    else:
        options.note_request(request)


def report_end(manager: Any, request: Any) -> dict[str, Any] | None:
    """Return the entry of the answer's `kv_transfer_params` at a request's end; None without options."""
    options = getattr(manager, "request_options", None)
    if options is not None:
        report = options.note_end(request)
        return None if report is None else {"kv_pool": report}
    params = request.sampling_params
    if params is None or not list_places(params.extra_args):
        return None
    return {"kv_pool": {"refused": NO_MANAGER}}


def read_max_pinned_blocks(manager: KVCacheManager) -> int:
    """Return the pin limit from the environment, at most what a request of the longest length leaves.

    With more pinned blocks, such a request could never run.
    """
    setting = os.environ.get(MAX_PINNED_BLOCKS) or "0"
    try:
        limit = int(setting)
    except ValueError:
        limit = -1
    if limit < 0:
        logger.warning("kv_pool refuses pins: %s is %r; it counts blocks", MAX_PINNED_BLOCKS, setting)
        return 0
    if limit and manager.max_model_len:
        num_left = manager.block_pool.num_gpu_blocks - 1 - manager.count_max_blocks(manager.max_model_len)
        if limit > num_left:
            limit = max(0, num_left)
            logger.warning(
                "kv_pool allows %d pinned blocks, not %s: a request of %d tokens needs the others",
                limit,
                setting,
                manager.max_model_len,
            )
    return limit
