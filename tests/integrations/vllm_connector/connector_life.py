"""A life of vLLM's scheduler with the connector, with or without the plugin; prints its course as JSON.

VLLM_PLUGINS=kv_pool python connector_life.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

from integrations.vllm_connector.checked_engine import CheckedEngine, block_bytes, live
from vllm.plugins import load_general_plugins


def main():
    load_general_plugins()
    folder = Path(sys.argv[1])
    told = []
    for seed, kinds in enumerate([("full",), ("full", "window")]):
        extra = {"host_bytes": block_bytes(20)}
        engine = CheckedEngine(folder, extra, kinds, num_blocks=22 * len(kinds))
        held = set()
        engine.connector.scheduler.take_orders = note_holds(engine, held)
        counts = live(engine, random.Random(seed), 40, waits=True)
        scheduler = engine.connector.scheduler
        told.append(
            {
                "counts": counts,
                "outputs": engine.outputs,
                "host": [key.hex() for key in scheduler.index.host.list_keys()],
                "pool": type(scheduler.block_pool).__module__,
                "holds": sorted(held),
                "free": engine.count_free(),
            }
        )
        engine.close()
    print(json.dumps(told))


def note_holds(engine, held):
    """Return the scheduler's `take_orders`, noting the reasons for which blocks of new stores are held."""
    scheduler = engine.connector.scheduler
    take_orders = scheduler.take_orders

    def take(request_ids):
        orders = take_orders(request_ids)
        explain = getattr(scheduler.block_pool, "explain_holds", None)
        for order in orders.stores:
            for block_id in order.blocks.values():
                assert scheduler.block_pool.blocks[block_id].ref_cnt > 0
                if explain is not None:
                    held.update(report.reason.partition(",")[0] for report in explain(block_id))
        return orders

    return take


if __name__ == "__main__":
    main()
