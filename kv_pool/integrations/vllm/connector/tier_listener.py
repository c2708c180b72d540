"""`TierListener`: learns which blocks enter and leave the tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kv_pool.ids import BlockHashWithGroupId
from kv_pool.integrations.vllm.connector.group_keys import GroupKeys


class TierListener(Protocol):
    """Receives the changes of a `TierScheduler`'s index, in order."""

    def on_planned(self, request: Any, group: GroupKeys, position: int, key: BlockHashWithGroupId) -> None:
        """A store of a request's block is planned; `position` is that in the block table."""

    def on_stored(self, keys: Sequence[BlockHashWithGroupId], on_disk: bool) -> None:
        """Keys are found in a tier from now on."""

    def on_store_ended(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """A planned store has ended; those of its keys that can be found were passed to `on_stored`."""

    def on_removed(self, keys: Sequence[BlockHashWithGroupId], on_disk: bool) -> None:
        """Keys are no longer found in a tier."""
