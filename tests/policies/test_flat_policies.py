"""Flat policies have libCacheSim's hit counts, to the integer; see `record_libcachesim.py`.

`KV_POOL_LIBCACHESIM_DATA` names the folder with libCacheSim's own traces, which are not in this repository.
"""

import json
import os
from itertools import islice
from pathlib import Path

import pytest
from core.policy_pool import look_up_alone
from policies.record_libcachesim import read_ids

from kv_pool import BlockPool
from kv_pool.lab.trace import Trace

DATA = Path(__file__).parent / "data" / "libcachesim_hits.json"
RECORDED = json.loads(DATA.read_text())
AGENTIC = Path(__file__).parent.parent / "lab" / "data" / "agentic_coding_a.jsonl.xz"
SHIPPED = {"cloudPhysicsIO": "cloudPhysicsIO.txt", "twitter_cluster52": "twitter_cluster52.csv"}
SHIPPED_FOLDER = os.environ.get("KV_POOL_LIBCACHESIM_DATA")


def list_cases():
    cases = []
    for key, (hits, num_keys) in RECORDED["hits"].items():
        trace, limit, policy, capacity = key.split()
        marks = [pytest.mark.slow] if trace.startswith("agentic") else []
        if limit == "all":
            marks = [pytest.mark.slow if trace.startswith("mooncake") else pytest.mark.night]
            marks.append(pytest.mark.timeout(3600))  # the agentic trace has 8 million block ids
        if trace in SHIPPED:
            needed = "KV_POOL_LIBCACHESIM_DATA: the folder with libCacheSim's traces"
            marks.append(pytest.mark.skipif(SHIPPED_FOLDER is None, reason=f"needs {needed}"))
        cases.append(pytest.param(trace, limit, policy, int(capacity), hits, num_keys, marks=marks, id=key))
    return cases


def read_keys(trace, limit):
    if trace in SHIPPED:
        numbers = {}
        for block_id in read_ids(str(Path(SHIPPED_FOLDER) / SHIPPED[trace]), None):
            yield b"%08d" % numbers.setdefault(block_id, len(numbers))
        return
    requests = Trace(str(AGENTIC) if trace.startswith("agentic") else trace)
    for request in islice(requests, None if limit == "all" else int(limit)):
        for block_id in request.hash_ids:
            yield b"%08d" % block_id


@pytest.mark.parametrize(("trace", "limit", "policy", "capacity", "hits", "num_keys"), list_cases())
def test_flat_policies_have_the_hits_of_libcachesim(trace, limit, policy, capacity, hits, num_keys):
    pool = BlockPool(capacity + 1, True, 4, policy=f"flat:{policy}")
    found = [look_up_alone(pool, key) for key in read_keys(trace, limit)]
    assert (len(found), sum(found)) == (num_keys, hits)
