"""Batches are encoded byte for byte as by vLLM 0.33; batches of other publishers are decoded."""

import contextlib
import random
import tracemalloc

import msgspec
import pytest

from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from kv_pool.errors import EventStreamError, InvalidArgumentError, InvalidTypeError
from kv_pool.events.batch import (
    _LARGE_BYTES,
    MAX_SEQUENCE,
    DecodedBatch,
    KVEventBatch,
    _encode_header,
    decode_batch,
    decode_lazily,
    encode_batch,
    encode_in_pieces,
    is_snapshot,
    pack_sequence,
    unpack_sequence,
)
from kv_pool.events.mirror import PrefixMirror

TS = 1700000000.5
HASH_0, HASH_1, HASH_B = 9561501211280363793, 15292913576410714033, 0x720B6A2C26AD57E4
DIGEST_0 = bytes.fromhex("58d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111")
FULL = {"extra_keys": [None], "group_idx": 0, "kv_cache_spec_kind": "full_attention"}


def stored(hashes, tokens, parent=None, lora_id=None, lora_name=None, block_size=4, **optional):
    return BlockStored(hashes, parent, tokens, block_size, lora_id, "GPU", lora_name, **optional)


# The other three are in the guide, and tests/test_documents.py reads them there.
GOLDEN = {
    "V2": (
        "93cb41d954fc4020000091de000ca474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf720b6a2c26ad57e4b1706172656e745f626c6f636b5f68617368cfd43b57df56b58fb1a9746f6b656e5f69647394ce0001117005cd012cce00030d40aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6eaa73657373696f6e5f6964a3732d3101",
        [stored([HASH_B], [70000, 5, 300, 200000], HASH_1, session_id="s-1", **FULL)],
        1,
    ),
    "V4": (
        "93cb41d954fc4020000091de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfbf4c352d2cb69ba9b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739409090909aa626c6f636b5f73697a6504a76c6f72615f696403a66d656469756da3475055a96c6f72615f6e616d65a9616461707465722d61aa65787472615f6b6579739192a9616461707465722d61a874656e616e742d31a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00",
        [
            stored(
                [13784451027614210985],
                [9] * 4,
                lora_id=3,
                lora_name="adapter-a",
                **FULL | {"extra_keys": [("adapter-a", "tenant-1")]},
            )
        ],
        0,
    ),
    "V6": (
        "93cb41d954fc4020000091de0008a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c42058d0879dff3800f65f8c5fd449d73048c0f7699dd238a03b84b146b151d55111b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0c0",
        [stored([DIGEST_0], [1, 2, 3, 4])],
        None,
    ),
}

EVERY_FIELD = stored(
    [1],
    [1, 2, 3, 4],
    locality="LOCAL",
    ownership="kvcr",
    session_id="s",
    lookahead_token_ids=[[5]],
    kv_cache_spec_sliding_window=8,
    **FULL,
)


def pack(*elements):
    return msgspec.msgpack.encode(list(elements))


@pytest.mark.parametrize("name", GOLDEN)
def test_batches_match_vllm_byte_for_byte_both_ways(name):
    payload, events, rank = GOLDEN[name]
    assert encode_batch(KVEventBatch(TS, events, rank)).hex() == payload
    batch = decode_batch(bytes.fromhex(payload))
    assert (batch.ts, batch.events, batch.data_parallel_rank, batch.num_dropped) == (TS, events, rank, 0)


def test_array_form_has_tag_first_and_omits_trailing_defaults():
    events = [stored([7], [1, 2], block_size=2), BlockRemoved([7], "GPU"), AllBlocksCleared(), EVERY_FIELD]
    raw = msgspec.msgpack.decode(encode_batch(KVEventBatch(TS, events, 0), positional=True))
    assert raw == [
        TS,
        [
            ["BlockStored", [7], None, [1, 2], 2, None, "GPU"],
            ["BlockRemoved", [7], "GPU"],
            ["AllBlocksCleared"],
            ["BlockStored", [1], None, [1, 2, 3, 4], 4, None, "GPU", None, [None], 0, "full_attention", 8],
        ],
        0,
    ]


def test_event_without_array_form_is_rejected():
    with pytest.raises(InvalidTypeError, match="int has no array form"):
        encode_batch(KVEventBatch(TS, [3], 0), positional=True)


TEXT_HASHES = ["12345678901234567890", "84b146b151d55111", "1", ""]

STORED_MAP = {
    "block_hashes": [-5],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "type": "BlockStored",
}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (STORED_MAP | {"unknown": [1]}, stored([-5], [1, 2], block_size=2)),
        (
            {
                "type": "BlockStored",
                "block_hashes": [1],
                "parent_block_hash": 0,
                "token_ids": [],
                "block_size": 0,
            },
            BlockStored([1], 0, [], 0, None, None, None),
        ),
        (
            {"block_hashes": [b"\1" * 32], "medium": None, "type": "BlockRemoved"},
            BlockRemoved([b"\1" * 32], None),
        ),
        ({"block_hashes": [1], "type": "BlockRemoved"}, BlockRemoved([1], None)),
        (["BlockStored", [1], None, [2], 1], BlockStored([1], None, [2], 1, None, None, None)),
        (
            ["BlockStored", [1], None, [2], 1, 3, "CPU", "x", [["x"]], 1, "sliding_window", 64, "new", {}],
            BlockStored([1], None, [2], 1, 3, "CPU", "x", [("x",)], 1, "sliding_window", 64),
        ),
        (["BlockRemoved", [1, 2], "GPU", 1, "full_attention", None], BlockRemoved([1, 2], "GPU", 1)),
        (["AllBlocksCleared"], AllBlocksCleared()),
        ({"type": "AllBlocksCleared", "medium": "GPU"}, AllBlocksCleared()),
    ],
    ids=str,
)
def test_batches_of_other_publishers_are_decoded(raw, expected):
    batch = decode_batch(pack(TS, [raw], 0))
    assert (batch.events, batch.num_dropped) == ([expected], 0)


@pytest.mark.parametrize(
    ("payload", "rank"),
    [
        (pack(TS, [["AllBlocksCleared"]]), None),
        (pack(1700000000, [["AllBlocksCleared"]], 3), 3),
        (pack(TS, [["AllBlocksCleared"]], None), None),
        (pack(TS, [["AllBlocksCleared"]], 2, {"more": 1}), 2),
    ],
)
@pytest.mark.parametrize("form", ["array", "map"])
def test_two_to_four_elements_and_integer_times_are_decoded(payload, rank, form):
    if form == "map":
        ts, _, *rest = msgspec.msgpack.decode(payload)
        payload = pack(ts, [{"type": "AllBlocksCleared"}], *rest)
    batch = decode_batch(payload)
    assert (batch.events, batch.data_parallel_rank) == ([AllBlocksCleared()], rank)
    assert isinstance(batch.ts, float)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"type": "BlockMoved"}, "unknown type 'BlockMoved'"),
        (["BlockMoved", 1], "unknown type 'BlockMoved'"),
        ({"block_hashes": [1]}, "unknown type None"),
        ({"type": ["x"]}, "unknown type"),
        ([], "neither a map nor an array"),
        ([[1]], "unknown type"),
        (7, "neither a map nor an array"),
        (STORED_MAP | {"block_hashes": "ab"}, "block_hashes"),
        (STORED_MAP | {"token_ids": [["x"]]}, "token_ids"),
        (STORED_MAP | {"token_ids": [1, [2]]}, "token_ids"),
        (STORED_MAP | {"token_ids": 7}, "token_ids"),
        *((STORED_MAP | {"block_hashes": [text]}, "block_hashes") for text in TEXT_HASHES),
        *((STORED_MAP | {"parent_block_hash": text}, "parent_block_hash") for text in TEXT_HASHES),
        *((["BlockStored", [text], None, [2], 1], "block_hashes") for text in TEXT_HASHES),
        *((["BlockRemoved", [1, text], "GPU"], "block_hashes") for text in TEXT_HASHES),
        ({"type": "BlockStored"}, "block_hashes"),
        (["BlockRemoved"], "block_hashes"),
    ],
    ids=str,
)
def test_invalid_event_is_dropped_and_counted_others_are_kept(raw, reason):
    batch = decode_batch(pack(TS, [raw, {"type": "AllBlocksCleared"}, raw], 0))
    assert batch.events == [AllBlocksCleared()]
    assert batch.num_dropped == 2
    assert reason in batch.first_drop_reason


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x00\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        pack(),
        pack(TS),
        pack("now", [], 0),
        pack(True, [], 0),
        pack(TS, {}, 0),
        pack(TS, [], "0"),
        msgspec.msgpack.encode({"ts": TS}),
        pack(TS, [], 0) + b"\0",
    ],
    ids=lambda payload: payload[:12].hex(),
)
def test_payload_that_is_not_a_batch_raises_typed_error(payload):
    with pytest.raises(EventStreamError, match=f"{len(payload)} bytes is not an event batch"):
        decode_batch(payload)


def test_batch_of_snapshot_size_is_decoded_like_a_small_one():
    stores = [stored([number], list(range(100)), **FULL, block_size=100) for number in range(2000)]
    payload = encode_batch(KVEventBatch(TS, [AllBlocksCleared(), *stores], 3))
    assert len(payload) > 2 * _LARGE_BYTES
    assert decode_batch(payload) == DecodedBatch(TS, [AllBlocksCleared(), *stores], 3)
    assert decode_batch(encode_batch(KVEventBatch(TS, stores, 3), positional=True)).events == stores
    nonsense = {"type": "BlockMoved"}
    batch = decode_batch(pack(TS, [nonsense, *[STORED_MAP] * 2000], 0))
    assert (len(batch.events), batch.num_dropped) == (2000, 1)
    with pytest.raises(EventStreamError, match="is not an event batch"):
        decode_batch(payload[:-1])


@pytest.mark.parametrize("seed", range(5))
def test_damaged_bytes_give_a_batch_or_a_typed_error(seed):
    rng = random.Random(seed)
    whole = [bytes.fromhex(payload) for payload, _, _ in GOLDEN.values()]
    for _ in range(2_000):
        payload = bytearray(rng.choice(whole))
        for _ in range(rng.randint(1, 4)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        if rng.random() < 0.2:
            del payload[rng.randrange(len(payload)) :]
        with contextlib.suppress(EventStreamError):
            decode_batch(bytes(payload))


def test_tokens_are_decoded_on_first_access_to_events():
    event = BlockStored([1], None, [1, 2, 70_000, 3], 4, None, "GPU", None)
    batch = decode_lazily(encode_batch(KVEventBatch(TS, [event, AllBlocksCleared()], 0)))
    assert isinstance(batch.unread_events[0].token_ids, msgspec.Raw)
    assert batch.events == [event, AllBlocksCleared()]
    assert [type(one) for one in batch.events] == [BlockStored, AllBlocksCleared]
    assert batch.unread_events == batch.events
    assert batch == decode_batch(encode_batch(KVEventBatch(TS, [event, AllBlocksCleared()], 0)))


PAIRS = [[100, 101], [101, 102], [102, 103], [103, 104]]


@pytest.mark.parametrize("tokens", [PAIRS, [[1, 2, 3]] * 4, None], ids=str)
@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("form", ["map", "array"])
def test_stores_with_grouped_tokens_keep_their_hashes(form, is_large, tokens):
    """SGLang with EAGLE sends pairs; each such store used to be dropped."""
    raw = STORED_MAP | {"block_hashes": [11], "block_size": 4, "token_ids": tokens}
    if form == "array":
        raw = ["BlockStored", [11], None, tokens, 4, None, "GPU"]
    num_events = 10_000 if is_large else 1
    batch = decode_lazily(pack(TS, [raw] * num_events, 0))
    for learns_tokens in (False, True):
        mirror = PrefixMirror(learns_tokens=learns_tokens)
        mirror.apply("engine", batch.unread_events)
        assert mirror.find_prefix([11]) == {"engine": 1}
    assert batch.events == [stored([11], [])] * num_events
    assert batch.num_dropped == 0
    mirror.apply("again", batch.events)
    assert mirror.find_prefix([11])["again"] == 1
    assert mirror.find_prefix_of_tokens([100, 101, 102, 103]) == {}


# ---- frames and snapshots ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequence", "frame"),
    [(0, "0000000000000000"), (258, "0000000000000102"), (MAX_SEQUENCE, "fffffffffffffffe")],
)
def test_sequence_is_8_bytes_big_endian(sequence, frame):
    assert pack_sequence(sequence).hex() == frame
    assert unpack_sequence(bytes.fromhex(frame)) == sequence


@pytest.mark.parametrize("sequence", [-1, MAX_SEQUENCE + 1])
def test_end_marker_is_not_a_valid_sequence(sequence):
    with pytest.raises(InvalidArgumentError, match=f"sequence is {sequence}"):
        pack_sequence(sequence)


@pytest.mark.parametrize("frame", [b"", b"\x00" * 7, b"\x00" * 9])
def test_frame_of_another_length_is_rejected(frame):
    with pytest.raises(EventStreamError, match=f"has {len(frame)} bytes"):
        unpack_sequence(frame)


@pytest.mark.parametrize("num_events", [0, 1, 15, 16, 300, 70_000])
@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("rank", [0, 200])
def test_pieces_give_the_same_bytes_as_one_call(num_events, positional, rank):
    events = [BlockRemoved([number], "GPU") for number in range(num_events)]
    chunks = [events[first : first + 17] for first in range(0, num_events, 17)]
    payload, num_left_out = encode_in_pieces(2.5, chunks, rank, positional)
    assert payload == encode_batch(KVEventBatch(2.5, events, rank), positional)
    assert num_left_out == 0


def test_header_of_a_large_array_is_made_without_its_elements():
    """A list of a million elements was encoded for it, in one call that stopped the pool's thread."""
    tracemalloc.start()
    try:
        assert _encode_header(2**24) == b"\xdd\x01\x00\x00\x00"
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_event_that_cannot_be_encoded_is_omitted_and_counted():
    good = [AllBlocksCleared(), BlockRemoved([1], None)]
    payload, num_left_out = encode_in_pieces(2.5, [[good[0]], [object(), good[1]], []], 0, False)
    assert payload == encode_batch(KVEventBatch(2.5, good, 0))
    assert num_left_out == 1


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([AllBlocksCleared()], True),
        ([AllBlocksCleared()] * 70_000, True),
        ([AllBlocksCleared(), BlockRemoved([1], "GPU")], True),
        ([], False),
        ([BlockRemoved([], None), AllBlocksCleared()], False),
        ([BlockRemoved([1], "GPU")], False),
    ],
)
@pytest.mark.parametrize("positional", [False, True])
def test_snapshot_is_recognized_by_its_first_bytes(events, expected, positional):
    assert is_snapshot(encode_batch(KVEventBatch(1.5, events, 0), positional)) is expected
