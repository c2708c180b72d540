"""vLLM's own structs decode all batches of a run."""

import msgspec
import pytest
from events.deadlines import wait_until
from events.made_publisher import make_publisher
from events.peers.busy_pool import BusyPool
from events.stream_readers import Requester

from kv_pool.events.batch import END_OF_REPLAY, decode_batch
from kv_pool.events.stream_state import StreamState

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("buffer_steps", [10_000, 4])
def test_vllm_decodes_batches_heartbeats_and_snapshots(buffer_steps):
    from vllm.distributed.kv_events import KVEventBatch

    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    pool = BusyPool()
    with (
        make_publisher(StreamState(), heartbeat_s=0.05, buffer_steps=buffer_steps) as publisher,
        Requester(publisher.replay_endpoint) as requester,
    ):
        pool.serve(publisher, 100)
        pool.reset(publisher)
        pool.serve(publisher, 60)
        num_heartbeats = publisher.get_statistics().num_empty_batches_sent
        wait_until(lambda: publisher.get_statistics().num_empty_batches_sent > num_heartbeats, "idle")
        requester.request(0)
        payloads = []
        while (frames := requester.receive_frames())[2] != END_OF_REPLAY:
            payloads.append(frames[3])
    assert len(payloads) > (160 if buffer_steps > 160 else 0)
    for payload in payloads:
        ours, theirs = decode_batch(payload), decoder.decode(payload)
        assert (theirs.ts, theirs.data_parallel_rank) == (ours.ts, ours.data_parallel_rank)
        assert [fields_of(event) for event in theirs.events] == [
            fields_of(ours_event, their_event.__struct_fields__)
            for ours_event, their_event in zip(ours.events, theirs.events, strict=True)
        ]


def fields_of(event, names=None):
    names = event.__struct_fields__ if names is None else names
    return type(event).__name__, {name: getattr(event, name) for name in names}
