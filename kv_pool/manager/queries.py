"""`ManagerQueries`: what a manager reports of its pool and of cached prefixes, without changes."""

from collections.abc import Iterable
from typing import SupportsIndex

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import as_count, as_int, check_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHash, RequestId
from kv_pool.manager.cached_prefix import CachedPrefix
from kv_pool.manager.prefix_hit import find_common_hit
from kv_pool.manager.request_tables import RequestTables
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.requests.request_checks import get_request_id


@mypyc_attr(allow_interpreted_subclasses=True)
class ManagerQueries(RequestTables):
    """The part of `KVCacheManager` that only looks."""

    @property
    def usage(self) -> float:
        """Share of the pool's blocks that are in use, 0 to 1."""
        num_blocks = self.block_pool.num_gpu_blocks - 1
        return 1.0 - self.get_num_free_blocks() / num_blocks if num_blocks else 0.0

    def get_num_free_blocks(self) -> int:
        """Return the number of free blocks of the pool, including those that a retention keeps."""
        if self.retention is not None and self.retention.holds_blocks:
            self.retention.expire()  # expired pins free their blocks
        return self.block_pool.free_block_queue.num_free_blocks

    def get_computed_blocks(
        self, request: SchedulableRequest, max_num_tokens: SupportsIndex | None = None
    ) -> CachedPrefix:
        """Find the longest cached prefix that all groups have; it may be empty. Changes nothing.

        Args:
            max_num_tokens: maximum length of the prefix. Default: all tokens but the last. The logits of the
                last token are needed, so its whole block is recomputed. A caller that needs no logits passes
                `request.num_tokens`.
        Cost: O(blocks found) for full attention, in one call into the pool; O(blocks of the prompt) for other
            groups.
        """
        request_id = get_request_id("request", request)
        num_tokens = junction = 0
        blocks: list[list[KVCacheBlock]]
        caching = self._caching
        if not self.block_pool.enable_caching or (
            caching.has_encoder and not caching.covers_encoder(request)
        ):
            blocks = [[] for _ in self._groups]
        else:
            num_known = request.num_tokens
            limit = num_known - 1
            if max_num_tokens is not None:
                limit = as_count("max_num_tokens", max_num_tokens)
            hashes: list[BlockHash] = request.block_hashes  # type: ignore[assignment]
            if len(hashes) * self.block_pool.hash_block_size > num_known:
                self._caching.raise_wrong_block_size(request, len(hashes))
            if self._rules is not None:
                listed = hashes if isinstance(hashes, list) else list(hashes)
                blocks, num_tokens, junction = self._rules.find_prefix(request, listed, limit)
            else:
                blocks, num_tokens = find_common_hit(self._groups, hashes, limit)
        return CachedPrefix(request_id, tuple(blocks), num_tokens, self.block_pool.num_evictions, junction)

    def list_step_ends(self, request: SchedulableRequest, cached_prefix: CachedPrefix) -> list[int]:
        """Return the numbers of tokens, ascending, at which steps of the prompt must end to cache its states.

        A `MambaSpec` group has a state at the end of a step only. `PrefixRules` select two states per request
        or, with a `retention_interval` other than 0, more. Without rules and without states: [].
        """
        get_request_id("request", request)
        check_type("cached_prefix", cached_prefix, CachedPrefix)
        if self._rules is None:
            return []
        return self._rules.list_step_ends(request, cached_prefix.num_tokens, cached_prefix.junction)

    def fits_alone(
        self,
        num_tokens: SupportsIndex,
        *,
        num_encoder_tokens: int = 0,
        cached_prefix: CachedPrefix | None = None,
    ) -> bool:
        """Return True if a request of `num_tokens` tokens in total can be completed, if necessary alone.

        If False, reject the request on arrival, or it waits forever; `explain_fit` says why. A window needs
        few blocks if steps are short, hence `max_in_flight_tokens`; without it, one step for all tokens is
        assumed.

        Args:
            cached_prefix: the result of `get_computed_blocks`. Blocks that are pinned without a deadline are
                not available, except those of this prefix.
        """
        return not self.explain_fit(
            num_tokens, num_encoder_tokens=num_encoder_tokens, cached_prefix=cached_prefix
        )

    def explain_fit(
        self,
        num_tokens: SupportsIndex,
        *,
        num_encoder_tokens: int = 0,
        cached_prefix: CachedPrefix | None = None,
    ) -> str:
        """Return why a request does not fit alone, with the pins that are in its way; "" if `fits_alone`."""
        num_most = self.count_max_blocks(num_tokens, num_encoder_tokens=num_encoder_tokens)
        num_blocks = self.block_pool.num_gpu_blocks - 1
        own: list[KVCacheBlock] = []
        request_id: RequestId | None = None
        if cached_prefix is not None:
            check_type("cached_prefix", cached_prefix, CachedPrefix)
            request_id = cached_prefix.request_id
            for blocks in cached_prefix.blocks:
                own += blocks
        pinned = self._list_lasting_pins(request_id, own)
        if num_most <= num_blocks - len(pinned):
            return ""
        why = f"a request of {num_tokens} tokens takes up to {num_most} of {num_blocks} blocks"
        if pinned:
            ids = sorted([block.block_id for block in pinned])
            listed = ", ".join([str(block_id) for block_id in ids[:16]]) + (", ..." if len(ids) > 16 else "")
            why += (
                f"; {len(ids)} are pinned without a deadline ({listed}); unpin some with "
                "BlockRetention.change_directives(), or reject the request"
            )
        return why

    def _list_lasting_pins(
        self, request_id: RequestId | None, own_blocks: Iterable[KVCacheBlock]
    ) -> set[KVCacheBlock]:
        """Return the blocks that pins without a deadline keep from a request, except those of its own."""
        if self.retention is None or not self.retention.num_pins:
            return set()
        return self.retention.list_lasting_pins(request_id).difference(own_blocks)

    def count_max_blocks(self, num_tokens: SupportsIndex, *, num_encoder_tokens: int = 0) -> int:
        """Return the most blocks that a request of `num_tokens` tokens ever holds; see `fits_alone`."""
        if not isinstance(num_encoder_tokens, int):
            num_encoder_tokens = as_int("num_encoder_tokens", num_encoder_tokens)
        num_all = as_int("num_tokens", num_tokens)
        if num_all < 0 or num_encoder_tokens < 0:
            raise InvalidArgumentError(
                f"num_tokens is {num_all}, num_encoder_tokens {num_encoder_tokens}; they count tokens, 0 "
                "or more"
            )
        return self._needs.count_max_blocks(num_all, num_encoder_tokens)
