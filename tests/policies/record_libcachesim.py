"""Record the hits of libCacheSim's flat policies on the two shared traces, for `test_flat_policies.py`.

    python tests/policies/record_libcachesim.py MOONCAKE.jsonl.gz AGENTIC.jsonl.xz

Needs libcachesim from PyPI, and nothing of kv_pool. Each block id of each request is a request of size 1, in
the order of the file.
"""

import gzip
import json
import lzma
import sys
from pathlib import Path

POLICIES = {
    "fifo": "FIFO",
    "lru": "LRU",
    "sieve": "Sieve",
    "s3fifo": "S3FIFO",
    "arc": "ARC",
    "twoq": "TwoQ",
    "slru": "SLRU",
    "mq": "MQ",
    "lirs": "LIRS",
    "lfu": "GDSF",
}
CAPACITIES = {
    "mooncake_conversation": (1000, 4000, 10000, 30000),
    "agentic_coding_a": (3000, 10000, 30000, 100000),
}
LIMITS = {"mooncake_conversation": (300, None), "agentic_coding_a": (20, None)}


def read_ids(path, limit):
    found = []
    with (lzma if path.endswith(".xz") else gzip).open(path, "rt") as lines:
        for number, line in enumerate(lines):
            if limit is not None and number >= limit:
                break
            found += json.loads(line)["hash_ids"]
    return found


def main():
    import libcachesim

    recorded = {"libcachesim": libcachesim.__version__, "policies": POLICIES, "hits": {}}
    for path in sys.argv[1:]:
        trace = Path(path).name.split(".")[0]
        for limit in LIMITS[trace]:
            block_ids = read_ids(path, limit)
            requests = {}
            for block_id in set(block_ids):
                requests[block_id] = libcachesim.Request()
                requests[block_id].obj_id = block_id + 1
                requests[block_id].obj_size = 1
            for policy, name in POLICIES.items():
                for capacity in CAPACITIES[trace]:
                    if limit is not None:
                        capacity //= 10
                    cache = getattr(libcachesim, name)(capacity)
                    get = cache._cache.get
                    hits = sum(get(requests[block_id]) for block_id in block_ids)
                    key = f"{trace} {limit or 'all'} {policy} {capacity}"
                    recorded["hits"][key] = [hits, len(block_ids)]
                    print(key, hits, len(block_ids), flush=True)
    data = Path(__file__).parent / "data" / "libcachesim_hits.json"
    data.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
