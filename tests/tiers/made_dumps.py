"""Splits a pool dump into records, and writes records to a file with valid checksums."""

from struct import Struct

import xxhash

from kv_pool.tiers.dump_file import MAGIC, VERSION

_START = Struct("<8sQ")
_FRAME = Struct("<IIQQ")
_CHECKSUM = Struct("<Q")


def split_records(data):
    """Return (kind, payload) of each record."""
    records = []
    place = _START.size
    while place < len(data):
        kind, _, num_bytes, _ = _FRAME.unpack_from(data, place)
        place += _FRAME.size + _CHECKSUM.size
        records.append((kind, data[place : place + num_bytes]))
        place += num_bytes
    return records


def write_records(path, records, version=VERSION):
    """Write any records to a file, with valid checksums."""
    with open(path, "wb") as file:
        file.write(_START.pack(MAGIC, version))
        for number, (kind, payload) in enumerate(records):
            frame = _FRAME.pack(kind, number, len(payload), xxhash.xxh3_64_intdigest(payload))
            file.write(frame + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(frame)) + payload)
