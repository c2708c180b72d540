"""`TierStatistics`: what vLLM logs about the tiers."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kv_pool.integrations.vllm.connector.tier_scheduler import TierScheduler

_COUNTS = ("stored blocks", "loaded tokens", "demoted blocks", "skipped blocks", "lost blocks")
_LEVELS = ("host blocks", "disk blocks", "waiting stores")


class TierStatistics(KVConnectorStats):  # type: ignore[misc]
    """Counts of an interval, and the tiers' present content, in `data`."""

    @classmethod
    def take_from(cls, scheduler: TierScheduler) -> TierStatistics:
        """Return the counts since the last call, and the present content."""
        counts = scheduler.take_counts()
        disk = scheduler.index.disk
        data: dict[str, Any] = {
            "stored blocks": counts.num_stored,
            "loaded tokens": counts.num_loaded_tokens,
            "demoted blocks": counts.num_demoted,
            "skipped blocks": counts.num_skipped,
            "lost blocks": counts.num_lost,
            "host blocks": len(scheduler.index.host),
            "disk blocks": 0 if disk is None else len(disk),
            "waiting stores": scheduler.index.num_arriving,
        }
        return cls(data=data)

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counts of a later interval; its content replaces this one's."""
        for name in _COUNTS:
            self.data[name] = self.data.get(name, 0) + other.data.get(name, 0)
        for name in _LEVELS:
            if name in other.data:
                self.data[name] = other.data[name]
        return self

    def reduce(self) -> dict[str, Any]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.get(name) for name in _COUNTS)
