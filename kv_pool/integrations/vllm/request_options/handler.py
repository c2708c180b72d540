"""`RequestOptionsHandler`: applies the `kv_pool` objects of requests to a manager's retention; under vLLM,
`EngineOptions`. Imports no vLLM.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kv_pool.core.arguments import as_count, check_type, get_request_id, refuse_type
from kv_pool.core.deadlines import NEVER
from kv_pool.environment import MAX_PINNED_BLOCKS
from kv_pool.errors import InvalidArgumentError, KVPoolError, PinLimitError
from kv_pool.events.event_publisher import is_worth_logging
from kv_pool.ids import RequestId
from kv_pool.integrations.vllm.request_options.options import (
    ABSENT,
    NO_MANAGER,
    RequestOptions,
    SessionOptions,
    find_options,
    list_places,
    make_refusal,
    read_options,
    warn_of_unread_options,
)
from kv_pool.loggers import get_logger
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.retention.block_retention import BlockRetention, join_stretches
from kv_pool.manager.retention.directive import DEFAULT_PRIORITY, RetentionDirective

logger = get_logger(__name__)


class RequestReport(msgspec.Struct, omit_defaults=True):
    """The `kv_pool` object of an answer. Fields at their defaults are left out.

    Attributes:
        retained_tokens: tokens of the request whose blocks its directives or its session keep.
        expires_in_ms: milliseconds until the last of these directives and the session end; absent if one of
            them has no end.
        changed_blocks: cached blocks that `change`, `demote` and `release` have found.
        ended_session: whether the session of `end_session` existed.
        refused: why the options, or the part that the message names, had no effect.
    """

    retained_tokens: int = 0
    expires_in_ms: int | None = None
    changed_blocks: int | None = None
    ended_session: bool | None = None
    refused: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict of JSON types."""
        answer: dict[str, Any] = msgspec.to_builtins(self)
        return answer


@dataclass(slots=True)
class OpenOptions:
    """The options of a request that has not ended, its directives and its report so far."""

    options: RequestOptions = field(default_factory=RequestOptions)
    directives: list[RetentionDirective] = field(default_factory=list)
    report: RequestReport = field(default_factory=RequestReport)
    num_computed: int = 0
    has_ended: bool = False


class RequestOptionsHandler:
    """The options of a manager's requests: decodes them, applies them, reports what they did.

        >>> from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
        >>> from kv_pool.integrations.vllm.request_options.handler import RequestOptionsHandler
        >>> manager = KVCacheManager(BlockPool(10, True, 4))
        >>> handler = RequestOptionsHandler(manager, clock=lambda: 0.0)
        >>> chat = Request("chat", range(10), BlockHasher(block_size=4))
        >>> ranges = [{"token_start": 0, "token_end": 8, "priority": 90, "duration_ms": 60000}]
        >>> handler.receive(chat, {"token_range_retention_configs": ranges})
        >>> _ = manager.allocate_slots(chat, 10)
        >>> chat.num_computed_tokens = 10
        >>> handler.note_end(chat).to_json()
        {'retained_tokens': 8, 'expires_in_ms': 60000}
        >>> manager.free(chat)
        >>> handler.note_freed(chat)

    An engine calls `receive` when a request with options arrives, `note_end` when it ends and still has its
    blocks, `note_freed` after it has freed them; after a preemption, `note_preempted` before and
    `note_freed` after. Invalid options raise nothing: the report says why they were refused.

    Args:
        manager: its retention is used; if it has none, the first request with options gives it one.
        clock: as for `BlockRetention`.
        max_pinned_blocks: as for `BlockRetention`; 0 refuses pins. Only used if the manager has no retention.

    Attributes:
        by_request: the options of requests that have not ended.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        clock: Callable[[], float],
        max_pinned_blocks: int = 0,
    ) -> None:
        check_type("manager", manager, KVCacheManager)
        if not callable(clock):
            refuse_type("clock", clock, "a function")
        self._manager = manager
        self._clock = clock
        self._max_pinned_blocks = as_count("max_pinned_blocks", max_pinned_blocks)
        self.by_request: dict[RequestId, OpenOptions] = {}

    def __repr__(self) -> str:
        return f"<RequestOptionsHandler: {len(self.by_request)} requests with options>"

    def receive(self, request: SchedulableRequest, value: Any) -> None:
        """Read the options of a request that has arrived, and apply them.

        Changes to cached blocks are made now. Directives apply when the request frees its blocks. Hints
        become its attribute `kv_hints`, which the pool's cache policy reads. If one part is refused, no part
        has an effect. A second call for the same request does nothing.

        Args:
            value: the `kv_pool` object, as `read_options` takes it.
        """
        request_id = get_request_id("request", request)
        if request_id in self.by_request:
            return
        kept = OpenOptions()
        try:
            options = read_options(value)
            directives = options.list_directives(request.num_tokens)
            session = options.session
            if session is not None and not (session.id or getattr(request, "session_id", None)):
                raise InvalidArgumentError(
                    "session has no id, and the request has no session_id; give one of them"
                )
            if not self._manager.block_pool.enable_caching:
                raise InvalidArgumentError("the engine's prefix cache is off; nothing can be retained")
            self._apply(request, options, directives, kept.report)
            if options.hints is not None:
                hinted: Any = request
                hinted.kv_hints = options.hints
            kept.options, kept.directives = options, directives
        except KVPoolError as error:
            self._refuse(request_id, kept.report, error)
        self.by_request[request_id] = kept

    def refuse(self, request: SchedulableRequest, reason: str) -> None:
        """Refuse the options of a request that has arrived, for a reason of the engine."""
        request_id = get_request_id("request", request)
        if request_id not in self.by_request:
            kept = self.by_request[request_id] = OpenOptions()
            self._refuse(request_id, kept.report, InvalidArgumentError(reason))

    def note_end(self, request: SchedulableRequest) -> RequestReport | None:
        """Keep the session of a request that ends, and return its report; None without options.

        Call it before the request's blocks are freed. A second call returns the same report.
        """
        kept = self.by_request.get(get_request_id("request", request))
        if kept is None:
            return None
        if kept.has_ended:
            return kept.report
        kept.has_ended = True
        session = kept.options.session
        if session is not None:
            session_id: Any = session.id or getattr(request, "session_id", None)
            until = self._clock() + session.duration_ms / 1000
            try:
                self._get_retention().keep_session(session_id, request, until, session.priority)
            except KVPoolError as error:
                self._refuse(request.request_id, kept.report, error)
                session = None
        self._count_retained(request, kept, session)
        return kept.report

    def note_preempted(self, request: SchedulableRequest) -> None:
        """Record how far a request was computed that is about to free its blocks and will return."""
        kept = self.by_request.get(get_request_id("request", request))
        if kept is not None:
            kept.num_computed = request.num_computed_tokens

    def note_freed(self, request: SchedulableRequest, will_return: bool = False) -> None:
        """Forget the options of a request that has freed its blocks, or never had any.

        Args:
            will_return: the request was preempted. Its directives stay; pins stay on the blocks that it freed
                and are promised for the others only.
        """
        request_id = get_request_id("request", request)
        kept = self.by_request.get(request_id)
        if kept is None:
            return
        retention = self._manager.retention
        if not will_return:
            if retention is not None:
                retention.set_directives(request_id, [])
            del self.by_request[request_id]
            return
        if not kept.directives:
            return
        assert retention is not None
        left = [self._cut_pin(one, kept.num_computed) for one in kept.directives]
        directives = [one for one in left if one is not None]
        try:
            retention.set_directives(request_id, directives)
        except PinLimitError as error:
            retention.set_directives(request_id, [one for one in directives if not one.pin])
            self._refuse(request_id, kept.report, error)

    # ---- parts -------------------------------------------------------------------------------------

    def _apply(
        self,
        request: SchedulableRequest,
        options: RequestOptions,
        directives: list[RetentionDirective],
        report: RequestReport,
    ) -> None:
        changes = options.list_changes()
        if not (directives or changes or options.session or options.end_session):
            return
        retention = self._get_retention()
        self._check_pins(retention, [*directives, *changes])
        if directives:
            retention.set_directives(request.request_id, directives)
        if changes:
            try:
                report.changed_blocks = retention.change_directives(request, changes)
            except Exception:
                retention.set_directives(request.request_id, [])
                raise
        if options.end_session is not None:
            report.ended_session = retention.end_session(options.end_session)

    def _get_retention(self) -> BlockRetention:
        manager = self._manager
        retention: BlockRetention | None = manager.retention
        if retention is None:
            retention = BlockRetention(manager.block_pool, self._clock, self._max_pinned_blocks)
            manager.attach_retention(retention)
        return retention

    def _check_pins(self, retention: BlockRetention, directives: list[RetentionDirective]) -> None:
        """Refuse a pin of more blocks than may be pinned at all, before its blocks are listed."""
        limit = retention.max_pinned_blocks
        smallest = min([spec.block_size for spec in self._manager.groups if spec.is_cacheable], default=1)
        for one in directives:
            if one.pin and one.end is not None and (one.end - one.start) // smallest > limit:
                raise PinLimitError(
                    f"a pin of tokens {one.start} to {one.end} takes up to {-(-one.end // smallest)} blocks; "
                    f"this engine allows {limit} pinned blocks in total. Pin less, use a priority, or have "
                    "the operator raise the limit"
                )

    def _cut_pin(self, directive: RetentionDirective, num_computed: int) -> RetentionDirective | None:
        """Return the part of a pin after the tokens whose blocks have it; other directives unchanged."""
        if not directive.pin or directive.end is None:
            return directive
        largest = max([spec.block_size for spec in self._manager.groups if spec.is_cacheable], default=1)
        start = max(directive.start, num_computed // largest * largest)
        if start >= directive.end:
            return None
        return RetentionDirective(start, directive.end, directive.priority, directive.duration_s, True)

    def _count_retained(
        self, request: SchedulableRequest, kept: OpenOptions, session: SessionOptions | None
    ) -> None:
        """Report how many tokens in full blocks are kept, and for how many milliseconds."""
        block_size = self._manager.block_size
        num_known = min(request.num_computed_tokens, request.num_tokens)
        num_full = num_known // block_size
        covered: list[tuple[int, int]] = []
        until_s = 0.0
        for one in kept.directives:
            if one.priority >= DEFAULT_PRIORITY and not one.is_none:
                end = num_full if one.end is None else min(num_full, -(-one.end // block_size))
                first = one.start // block_size
                if first < end:
                    covered.append((first, end))
                    until_s = max(until_s, NEVER if one.duration_s is None else one.duration_s)
        if session is not None:
            covered.append((0, num_full))
            until_s = max(until_s, session.duration_ms / 1000)
        num_covered = sum([high - low for low, high in join_stretches(covered)])
        kept.report.retained_tokens = num_covered * block_size
        if num_covered and until_s < NEVER:
            kept.report.expires_in_ms = round(until_s * 1000)

    def _refuse(self, request_id: RequestId, report: RequestReport, error: Exception) -> None:
        report.refused = make_refusal(error)


class EngineOptions(RequestOptionsHandler):
    """Finds the options of vLLM's requests and applies them; at level `manager` only.

    The manager and a connector call the same methods; each may come first. None of these methods raises an
    error, which would stop the engine.

    Args:
        max_pinned_blocks: see `read_max_pinned_blocks`.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        max_pinned_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(manager, clock, max_pinned_blocks)
        self._num_refused = 0
        self._place = ""  # of the options that are being read

    def note_request(self, request: Any) -> None:
        """Read and apply the options of a request, unless that has been done."""
        if request.request_id in self.by_request or request.sampling_params is None:
            return
        try:
            places = list_places(request.sampling_params.extra_args)
            self._place = next(iter(places), "")
            value = find_options(places)
            if value is not ABSENT:
                self.receive(request, value)
        except InvalidArgumentError as error:
            self.refuse(request, str(error))
        except Exception:
            logger.exception("kv_pool could not apply the options of request %s", request.request_id)
        self._place = ""

    def report_end(self, request: Any) -> dict[str, Any] | None:
        """Apply what the end of a request starts, and return its report; None without options.

        Call it before the request's blocks are freed.
        """
        try:
            report = self.note_end(request)
        except Exception:
            logger.exception("kv_pool could not apply the options of request %s", request.request_id)
            return None
        return None if report is None else report.to_json()

    def note_leaving(self, request: Any) -> None:
        """Record that a request with options is about to free its blocks: it has ended or is preempted."""
        if request.is_finished():
            self.report_end(request)
        else:
            self.note_preempted(request)

    def note_left(self, request: Any) -> None:
        """Record that the request has freed its blocks."""
        try:
            self.note_freed(request, will_return=not request.is_finished())
        except Exception:
            logger.exception("kv_pool could not end the options of request %s", request.request_id)

    def _refuse(self, request_id: RequestId, report: RequestReport, error: Exception) -> None:
        super()._refuse(request_id, report, error)
        self._num_refused += 1
        if is_worth_logging(self._num_refused):
            logger.warning(
                "kv_pool refuses the options of request %s%s: %s (%d requests with refused options so far)",
                request_id,
                f" in {self._place}" if self._place else "",
                str(report.refused).removeprefix("kv_pool: "),
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
        report = options.report_end(request)
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
