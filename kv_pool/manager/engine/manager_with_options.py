"""`ManagerWithOptions`: an `EngineManager` whose requests may carry options of their clients."""

from typing import Any

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import GroupId, RequestId
from kv_pool.manager.engine.cache_blocks import KVCacheBlocks
from kv_pool.manager.engine.engine_manager import EngineManager


@mypyc_attr(allow_interpreted_subclasses=True)
class ManagerWithOptions(EngineManager):
    """Notifies an object of the requests that may have options, and of the ends of those that have.

    A request without `sampling_params.extra_args` costs two attribute lookups more, and its free one lookup.

    Attributes:
        request_options: the object; None until `set_request_options`.
    """

    request_options: Any = None
    _with_options: dict[Any, Any] | None = None

    def set_request_options(self, options: Any) -> None:
        """Call `note_request` of `options`; for requests in its `by_request` `note_leaving`, `note_left`."""
        self.request_options = options
        self._with_options = options.by_request

    def get_computed_blocks(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """Apply the request's options, then find the longest cached prefix as `EngineManager` does."""
        params: Any = request.sampling_params
        if params is not None and self.request_options is not None:
            arguments: Any = params.extra_args
            if arguments is not None:
                self.request_options.note_request(request)
        return super().get_computed_blocks(request, max_cache_hit_length)

    def free(self, request: Any) -> None:
        """Release all blocks of the request, as `EngineManager` does."""
        if not self._has_options(request):
            super().free(request)
            return
        self.request_options.note_leaving(request)
        super().free(request)
        self.request_options.note_left(request)

    def pop_blocks_for_free(self, request: Any) -> list[KVCacheBlock]:
        """Forget the request and return its blocks for the caller to free; its directives apply to them."""
        if not self._has_options(request):
            return super().pop_blocks_for_free(request)
        self.request_options.note_leaving(request)
        request_id: RequestId = request.request_id
        retention = self.manager.retention
        tables = self.manager._tables.get(request_id)
        if retention is not None and tables is not None:
            for group_id, table in enumerate(tables):
                first = table.num_null_blocks
                retention.label_table(request_id, GroupId(group_id), first, table.blocks[first:])
            retention.forget_request(request_id)
        blocks = super().pop_blocks_for_free(request)
        self.request_options.note_left(request)
        return blocks

    def _has_options(self, request: Any) -> bool:
        with_options = self._with_options
        if with_options is None or len(with_options) == 0:
            return False
        request_id: RequestId = request.request_id
        return request_id in with_options
