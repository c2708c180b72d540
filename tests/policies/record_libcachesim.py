"""Record the hits of libCacheSim's flat policies on traces, for `test_flat_policies.py`.

    python tests/policies/record_libcachesim.py MOONCAKE.jsonl.gz AGENTIC.jsonl.xz
    python tests/policies/record_libcachesim.py DATA/cloudPhysicsIO.txt DATA/twitter_cluster52.csv

Needs libcachesim from PyPI, and nothing of kv_pool. Each block id of each request, or each line, is a request
of size 1, in the order of the file. The other traces in the record stay. libCacheSim's own traces (DATA) are
in its source distribution, under src/libCacheSim/data; the wheel has none:

    pip download --no-deps --no-binary :all: libcachesim==0.3.5
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
}
CAPACITIES = {
    "mooncake_conversation": (1000, 4000, 10000, 30000),
    "agentic_coding_a": (3000, 10000, 30000, 100000),
    "cloudPhysicsIO": (500, 2000, 8000, 20000),
    "twitter_cluster52": (1000, 5000, 20000, 80000),
}
LIMITS = {"mooncake_conversation": (300, None), "agentic_coding_a": (20, None)}
DATA = Path(__file__).parent / "data" / "libcachesim_hits.json"


def read_ids(path, limit):
    found = []
    open_text = {".xz": lzma.open, ".gz": gzip.open}.get(Path(path).suffix, open)
    with open_text(path, "rt") as lines:
        for number, line in enumerate(lines):
            if limit is not None and number >= limit:
                break
            if ".jsonl" in path:
                found += json.loads(line)["hash_ids"]
            elif not line.startswith("#"):
                found.append(int(line.split(",")[-3]) if ".csv" in path else int(line))
    return found


def main():
    import libcachesim

    recorded = json.loads(DATA.read_text())
    recorded |= {"libcachesim": libcachesim.__version__, "policies": POLICIES}
    for path in sys.argv[1:]:
        trace = Path(path).name.split(".")[0]
        for limit in LIMITS.get(trace, (None,)):
            block_ids = read_ids(path, limit)
            requests = {}
            for block_id in block_ids:
                if block_id not in requests:
                    requests[block_id] = libcachesim.Request()
                    requests[block_id].obj_id = len(requests)
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
    DATA.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
