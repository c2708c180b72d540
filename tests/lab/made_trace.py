"""Builds small traces for tests: records in the trace format, and files of them."""

import gzip
import json
import lzma

from backports import zstd

COMPRESS = {
    ".jsonl": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    # With a checksum, like the zstd command; the library's default has none.
    ".zst": lambda data: zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1}),
}


def record(input_length, hash_ids, output_length=0, timestamp=0, **more):
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
        **more,
    }


def write_trace(path, records):
    """Write one line per record, compressed according to the suffix. Strings and bytes are written as is."""
    lines = [line if isinstance(line, (str, bytes)) else json.dumps(line) for line in records]
    data = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
    path.write_bytes(COMPRESS[path.suffix](data))
    return path


def make_random_records(rng, num_requests, block_size, partial_ids):
    """Return random requests that share prefixes; some prompts occur twice.

    Args:
        partial_ids: whether a partial last block has an id (as in the Mooncake trace) or not (as in the
            agentic trace).
    """
    prefixes = [[]]
    prompts = []
    records = []
    num_ids = 0
    timestamp = 0
    for _ in range(num_requests):
        timestamp += rng.randrange(30)
        if prompts and rng.random() < 0.3:
            input_length, ids = rng.choice(prompts)
        else:
            kept = rng.choice(prefixes)
            kept = kept[: rng.randrange(len(kept) + 1)]
            num_new = rng.randrange(4)
            full = kept + list(range(num_ids, num_ids + num_new))
            num_ids += num_new
            rest = rng.randrange(block_size) if full else rng.randrange(1, block_size)
            prefixes.append(full)
            ids = full
            if rest and partial_ids:
                ids = [*full, num_ids]
                num_ids += 1
            input_length = len(full) * block_size + rest
            prompts.append((input_length, ids))
        records.append(record(input_length, ids, rng.randrange(20), timestamp))
    return records
