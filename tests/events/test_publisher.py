"""The contract of both publishers; socket behaviour is tested on real sockets."""

import errno
import os
import re
import socket as tcp
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import zmq
import zmq.auth
from events.deadlines import wait_until
from events.made_events import draw
from events.made_publisher import FREE_PORT, GatedState, make_publisher
from events.stream_readers import TIMEOUT_MS, Reader, Requester, Subscriber, removed, subscribed
from made_threads import no_new_threads
from zmq.utils.monitor import recv_monitor_message

from kv_pool.core.kv_events import AllBlocksCleared, BlockStored
from kv_pool.errors import (
    EndpointError,
    InvalidArgumentError,
    KVPoolError,
    OutOfThreadsError,
    PublisherClosedError,
)
from kv_pool.events.batch import KVEventBatch, decode_batch, encode_batch
from kv_pool.events.event_publisher import GroupSpec, NullEventPublisher, PublisherConfig, PublisherStatistics
from kv_pool.events.publisher import ZMQEventPublisher
from kv_pool.events.stream_state import StreamState
from kv_pool.events.subscriber import KVEventSubscriber
from kv_pool.threads import start_thread

MAKERS = {"null": NullEventPublisher, "zmq": make_publisher}


@pytest.fixture(params=MAKERS)
def any_publisher(request):
    with MAKERS[request.param]() as publisher:
        yield publisher


def stored(group_idx=0, **optional):
    return BlockStored([1], None, [1], 1, None, "GPU", None, group_idx=group_idx, **optional)


# ---- the contract of all publishers ------------------------------------------------------------------


def test_publisher_accepts_events_until_it_is_closed(any_publisher):
    for endpoint in (any_publisher.endpoint, any_publisher.replay_endpoint):
        assert endpoint is None or (endpoint.startswith("tcp://127.0.0.1:") and not endpoint.endswith(":0"))
    with any_publisher as entered:
        assert entered is any_publisher
        any_publisher.publish([removed(1)])
        any_publisher.publish([])
        assert isinstance(any_publisher.get_statistics(), PublisherStatistics)
    any_publisher.close()
    for events in ([removed(1)], []):
        with pytest.raises(PublisherClosedError):
            any_publisher.publish(events)


# ---- live batches ------------------------------------------------------------------------------------


def test_frames_are_topic_sequence_payload():
    events = [stored(kv_cache_spec_kind="full_attention")]
    with (
        make_publisher(topic="kv@pod@model", data_parallel_rank=3) as publisher,
        subscribed(publisher, topic=b"kv@pod") as (subscriber, first),
    ):
        publisher.publish(events)
        topic, sequence, payload = subscriber.receive_frames()
    assert (topic, sequence) == (b"kv@pod@model", first.to_bytes(8, "big"))
    assert payload == encode_batch(KVEventBatch(1700000000.5, events, 3))


def test_empty_list_sends_no_batch():
    with make_publisher() as publisher, subscribed(publisher) as (subscriber, first):
        publisher.publish([])
        publisher.publish([removed(1)])
        assert subscriber.receive_numbers() == (first, [1])


def test_array_form_is_sent_if_configured():
    with make_publisher(positional=True) as publisher, subscribed(publisher) as (subscriber, _):
        publisher.publish([removed(1)])
        payload = subscriber.receive_frames()[2]
    assert payload == encode_batch(KVEventBatch(1700000000.5, [removed(1)], 0), positional=True)


def test_stores_carry_the_kind_of_their_group():
    groups = (GroupSpec(), GroupSpec(kind="sliding_window", sliding_window=128))
    with make_publisher(groups=groups) as publisher, subscribed(publisher) as (subscriber, _):
        publisher.publish(
            [stored(0), stored(1), stored(7), stored(None), stored(0, kv_cache_spec_kind="mamba")]
        )
        _, batch = subscriber.receive()
    assert [(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) for event in batch.events] == [
        ("full_attention", None),
        ("sliding_window", 128),
        ("unknown", None),
        (None, None),
        ("mamba", None),
    ]


def test_idle_publisher_sends_heartbeats():
    with make_publisher(heartbeat_s=0.001) as publisher, Subscriber(publisher.endpoint) as subscriber:
        first, batch = subscriber.receive()
        assert batch.events == []
        assert [subscriber.receive()[0] for _ in range(3)] == [first + 1, first + 2, first + 3]
    assert publisher.get_statistics().num_empty_batches_sent >= 4


def test_infinite_pause_between_heartbeats_is_none():
    with make_publisher(heartbeat_s=float("inf")) as publisher:
        publisher.publish([removed(1)])
        wait_until(lambda: publisher.get_statistics().last_sequence == 0, "sent")


def test_batch_that_cannot_be_encoded_leaves_a_hole():
    with make_publisher() as publisher, subscribed(publisher) as (subscriber, first):
        publisher.publish([removed(1), object()])
        publisher.publish([removed(2**64)])
        publisher.publish(7)
        publisher.publish([removed(4)])
        assert subscriber.receive_numbers() == (first + 3, [4])
        statistics = publisher.get_statistics()
    assert (statistics.num_batches_failed, statistics.num_events_failed) == (3, 4)


def test_batch_that_cannot_be_sent_is_replayed():
    """The next batch was part of the same message, and readers understood neither."""
    numbers = []
    with (
        make_publisher() as publisher,
        KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint) as reader,
    ):
        while not numbers:
            publisher.publish([removed(0)])
            numbers += [item.sequence for item in reader.poll(0.1)]
        live = publisher._sockets.live

        def send_short(frame, flags=0):
            if len(frame) > 1000:
                raise MemoryError
            live.send(frame, flags)

        publisher._sockets.live = SimpleNamespace(send=send_short, close=live.close)
        publisher.publish([removed(number) for number in range(1000)])
        publisher.publish([removed(4)])
        wait_until(lambda: publisher.get_statistics().num_batches_failed == 1, "failed")
        counts = publisher.get_statistics()
        while len(numbers) <= counts.last_sequence:
            numbers += [item.sequence for item in reader.poll(0.1)]
    assert numbers == [*range(len(numbers))]
    assert counts.num_events_failed == 1000


def test_several_threads_may_publish():
    num_threads, num_batches = 4, 500
    with make_publisher() as publisher, subscribed(publisher) as (subscriber, first):

        def publish(thread):
            for number in range(num_batches):
                publisher.publish([removed(thread * num_batches + number)])

        threads = [threading.Thread(target=publish, args=(thread,)) for thread in range(num_threads)]
        for thread in threads:
            thread.start()
        seen = [[] for _ in threads]
        for offset in range(num_threads * num_batches):
            sequence, (number,) = subscriber.receive_numbers()
            assert sequence == first + offset
            seen[number // num_batches].append(number % num_batches)
        for thread in threads:
            thread.join()
    assert seen == [list(range(num_batches))] * num_threads


# ---- a full queue ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when_full", "sent"),
    [
        ("drop_oldest", {0: ["- 0"], 3: ["clear", "- 3"], 4: ["- 4"], 5: ["- 5"], 6: ["- 6"]}),
        ("drop_newest", {0: ["- 0"], 1: ["- 1"], 2: ["- 2"], 3: ["- 3"], 6: ["clear", "- 6"]}),
    ],
)
def test_full_queue_drops_batches_and_leaves_a_hole(when_full, sent):
    """Batches 1 to 5 are published into a queue of 3 while batch 0 blocks."""
    state = GatedState()
    with make_publisher(state, max_queue_size=3, when_full=when_full) as publisher:
        publisher.publish([removed(0)])
        assert state.entered.wait(20)
        for number in range(1, 6):
            publisher.publish((removed(number),))
        dropped = publisher.get_statistics()
        state.gate.set()
        wait_until(lambda: publisher.get_statistics().num_queued == 0, "taken")
        publisher.publish([removed(6)])
        wait_until(lambda: publisher.get_statistics().last_sequence == 6, "sent")
        batches = publisher._replay_server.buffer.list_from(0, 9)
    assert (dropped.num_batches_dropped, dropped.num_events_dropped, dropped.num_queued) == (2, 2, 3)
    assert {sequence: draw(decode_batch(payload).events) for sequence, payload in batches} == sent


@pytest.mark.parametrize("bad", [object(), removed(2**64)], ids=["rejected", "not encoded"])
def test_broken_batch_leaves_no_block_and_is_followed_by_a_clear(bad):
    """A block whose removal was lost was in snapshots until the next batch."""
    state = StreamState()
    with make_publisher(state) as publisher:
        publisher.publish([stored()])
        publisher.publish([removed(1), bad])
        wait_until(lambda: publisher.get_statistics().last_sequence == 1, "skipped")
        assert state.take_snapshot() == (1, [AllBlocksCleared()])
        publisher.publish([removed(3)])
        publisher.publish([removed(4)])
        wait_until(lambda: publisher.get_statistics().last_sequence == 3, "sent")
        batches = publisher._replay_server.buffer.list_from(0, 9)
    drawn = {sequence: draw(decode_batch(payload).events) for sequence, payload in batches}
    assert drawn == {0: ["> 1"], 2: ["clear", "- 3"], 3: ["- 4"]}


def test_heartbeat_shows_a_loss_that_no_batch_follows():
    state = GatedState()
    with make_publisher(state, max_queue_size=1, when_full="drop_newest", heartbeat_s=0.01) as publisher:
        publisher.publish([removed(0)])
        assert state.entered.wait(20)
        publisher.publish([removed(1)])
        publisher.publish([removed(2)])
        state.gate.set()
        wait_until(lambda: publisher.get_statistics().num_batches_sent >= 3, "sent")
        ((sequence, payload),) = publisher._replay_server.buffer.list_from(3, 1)
    assert publisher.get_statistics().num_batches_dropped == 1
    assert (sequence, decode_batch(payload).events) == (3, [AllBlocksCleared()])


# ---- closing -----------------------------------------------------------------------------------------


def test_close_sends_queued_batches():
    publisher = make_publisher()
    with subscribed(publisher) as (subscriber, first):
        for number in range(1_000):
            publisher.publish([removed(number)])
        publisher.close()
        for number in range(1_000):
            assert subscriber.receive_numbers() == (first + number, [number])
    statistics = publisher.get_statistics()
    assert (statistics.num_queued, statistics.last_sequence) == (0, first + 999)


def test_close_does_not_wait_forever_for_a_slow_subscriber():
    publisher = make_publisher(linger_s=0.0)
    with subscribed(publisher) as (_, first):
        publisher.publish([removed(1)])
        publisher.close()
    statistics = publisher.get_statistics()
    assert statistics.num_queued == 0
    assert statistics.num_batches_sent + statistics.num_batches_dropped == first + 1


def test_program_that_forgets_to_close_exits():
    code = (
        "from kv_pool.events.event_publisher import PublisherConfig\n"
        "from kv_pool.events.publisher import ZMQEventPublisher\n"
        "from kv_pool.core.kv_events import AllBlocksCleared\n"
        f"config = PublisherConfig(endpoint={FREE_PORT!r}, replay_endpoint={FREE_PORT!r})\n"
        "publisher = ZMQEventPublisher(config)\n"
        "publisher.publish([AllBlocksCleared()])\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stderr == ""


# ---- endpoints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", ["endpoint", "replay_endpoint"])
def test_port_in_use_raises_typed_error_and_leaves_no_threads(taken):
    with make_publisher() as publisher:
        num_threads = threading.active_count()
        settings = {"endpoint": FREE_PORT, "replay_endpoint": FREE_PORT, taken: getattr(publisher, taken)}
        with pytest.raises(EndpointError, match=r"cannot bind .*Use another port, or 0") as caught:
            make_publisher(**settings)
        assert caught.value.errno == zmq.EADDRINUSE
        assert isinstance(caught.value, OSError)
        assert isinstance(caught.value, KVPoolError)
        assert threading.active_count() == num_threads


@pytest.mark.parametrize(
    ("settings", "warns"),
    [({}, False), ({"endpoint": "tcp://*:0"}, True), ({"replay_endpoint": "tcp://*:0"}, True)],
)
def test_unencrypted_stream_on_a_network_logs_a_warning(settings, warns, caplog):
    with make_publisher(**settings):
        assert ("can read the token ids" in caplog.text) is warns


def test_address_of_another_machine_cannot_be_bound():
    with pytest.raises(EndpointError, match="connects to those of other machines"):
        make_publisher(endpoint="tcp://192.0.2.1:5557", bind=True)


def test_publisher_can_connect_to_a_subscriber_that_binds():
    with Reader(zmq.SUB, "inproc://unused") as reader:
        reader.socket.subscribe(b"")
        port = reader.socket.bind_to_random_port("tcp://127.0.0.1")
        with make_publisher(endpoint=f"tcp://127.0.0.1:{port}", bind=False) as publisher:
            while not reader.socket.poll(10):
                publisher.publish([removed(1)])


def test_inproc_endpoint_is_in_the_shared_context():
    with make_publisher(
        endpoint="inproc://test-events", data_parallel_rank=2, replay_endpoint=None
    ) as publisher:
        assert publisher.endpoint == "inproc://test-events_dp2"
        socket = zmq.Context.instance().socket(zmq.SUB)
        socket.connect(publisher.endpoint)
        socket.subscribe(b"")
        while not socket.poll(10):
            publisher.publish([removed(1)])
        socket.close(linger=0)


# ---- CURVE -------------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path):
    """Create key files of a server and two clients, and a directory with only the first client's key."""
    made = {name: zmq.auth.create_certificates(tmp_path, name) for name in ("server", "friend", "stranger")}
    admitted = tmp_path / "admitted"
    admitted.mkdir()
    (admitted / "friend.key").write_bytes((tmp_path / "friend.key").read_bytes())
    return {name: secret for name, (_, secret) in made.items()} | {"admitted": str(admitted)}


def client_options(keys, name):
    public_key, secret_key = zmq.auth.load_certificate(keys[name])
    server_key, _ = zmq.auth.load_certificate(keys["server"])
    return {"curve_publickey": public_key, "curve_secretkey": secret_key, "curve_serverkey": server_key}


def handshake_of(kind, endpoint, **options):
    """Return the monitor event with which the handshake of a new connection ends."""
    outcomes = (
        zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_DISCONNECTED
    )
    with Reader(kind, "inproc://unused", **options) as reader:
        monitor = reader.socket.get_monitor_socket(outcomes)
        reader.socket.connect(endpoint)
        assert monitor.poll(TIMEOUT_MS)
        event = recv_monitor_message(monitor)["event"]
        reader.socket.disable_monitor()
        monitor.close(linger=0)
    return event


@pytest.mark.parametrize("lists_readers", [False, True])
def test_encrypted_stream_admits_only_readers_with_a_key(keys, lists_readers):
    """Without a list, a reader needs the server's public key only."""
    folder = keys["admitted"] if lists_readers else None
    friend, stranger = client_options(keys, "friend"), client_options(keys, "stranger")
    if not lists_readers:
        stranger["curve_serverkey"] = stranger["curve_publickey"]
    with make_publisher(curve_secret_key_file=keys["server"], curve_client_keys_dir=folder) as publisher:
        for kind, endpoint in ((zmq.SUB, publisher.endpoint), (zmq.DEALER, publisher.replay_endpoint)):
            assert handshake_of(kind, endpoint, **friend) == zmq.EVENT_HANDSHAKE_SUCCEEDED
            assert handshake_of(kind, endpoint, **stranger) != zmq.EVENT_HANDSHAKE_SUCCEEDED
            assert handshake_of(kind, endpoint) != zmq.EVENT_HANDSHAKE_SUCCEEDED


@pytest.mark.parametrize(
    "name", ["replay_server.start_thread", "replay_server.socketpair", "publisher.start_thread"]
)
def test_publisher_that_gets_no_thread_frees_its_ports(name, monkeypatch):
    """Without descriptors for a socket pair its sockets stayed open."""
    with make_publisher(replay_endpoint=FREE_PORT) as publisher:
        places = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:

        def refuse(*arguments):
            with no_new_threads():
                return start_thread(*(arguments or ("none", print)))

        patch.setattr(f"kv_pool.events.{name}", refuse)
        with pytest.raises(OutOfThreadsError):
            make_publisher(**places)
    assert set(threading.enumerate()) <= before
    with make_publisher(**places) as publisher:
        assert publisher.endpoint == places["endpoint"]


@pytest.mark.parametrize(
    ("method", "failure", "expected"),
    [
        ("ThreadAuthenticator.configure_curve", OSError("no directory"), InvalidArgumentError),
        ("AuthenticationThread.start", RuntimeError("can't start new thread"), OutOfThreadsError),
        ("ThreadAuthenticator.start", zmq.ZMQError(errno.EMFILE), EndpointError),
    ],
)
def test_failure_to_start_the_authenticator_closes_it(keys, monkeypatch, method, failure, expected):
    """Its thread kept a socket open, or was waited for, and the publisher waited forever."""

    def refuse(*arguments, **options):
        raise failure

    monkeypatch.setattr(f"zmq.auth.thread.{method}", refuse)
    before = set(threading.enumerate())
    with pytest.raises(expected, match=re.escape(str(failure))):
        make_publisher(curve_secret_key_file=keys["server"], curve_client_keys_dir=keys["admitted"])
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("function", "open_one"),
    [
        ("kv_pool.events.replay_server.socketpair", make_publisher),
        ("socket.socketpair", lambda: KVEventSubscriber("inproc://nowhere")),
        ("zmq.Context.socket", lambda: KVEventSubscriber("inproc://nowhere")),
    ],
)
def test_missing_file_descriptors_are_an_endpoint_error(function, open_one, monkeypatch):
    """They were raw errors of the system, and a subscriber left its ZeroMQ context open."""

    def refuse(*arguments):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(function, refuse)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(EndpointError, match=r"cannot open the sockets for .*too many open files"):
        open_one()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_invalid_keys_are_rejected_with_a_message(keys, tmp_path):
    empty = tmp_path / "empty.key"
    empty.write_text("nothing\n")
    for path in (str(tmp_path / "missing"), str(empty), keys["server"].removesuffix("_secret")):
        with pytest.raises(InvalidArgumentError, match="curve_secret_key_file"):
            make_publisher(curve_secret_key_file=path)
    with pytest.raises(InvalidArgumentError, match="curve_client_keys_dir"):
        make_publisher(curve_secret_key_file=keys["server"], curve_client_keys_dir=str(tmp_path / "none"))


# ---- without pyzmq -----------------------------------------------------------------------------------


def test_error_without_pyzmq_says_how_to_install_it():
    code = (
        "import sys; sys.modules['zmq'] = None\n"
        "import kv_pool.events.event_publisher\n"
        "from kv_pool.errors import MissingDependencyError\n"
        "try:\n    import kv_pool.events.publisher\n"
        "except MissingDependencyError as error: print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install '.[zmq]'" in told.stdout


# ---- paths of ipc endpoints ----------------------------------------------------------------------


def publish_at(endpoint, **more):
    return ZMQEventPublisher(PublisherConfig(endpoint=endpoint, **more))


@pytest.mark.parametrize("is_replay", [False, True])
def test_second_publisher_does_not_take_over_an_ipc_path(tmp_path, is_replay):
    """It used to replace the socket silently, and the readers of the first one heard nothing more."""
    endpoint = f"ipc://{tmp_path}/events"
    other = {"replay_endpoint": endpoint} if is_replay else {}
    with publish_at(endpoint) as first, KVEventSubscriber(endpoint) as subscriber:
        with pytest.raises(EndpointError, match=r"cannot bind ipc:.* another process or object listens"):
            publish_at(f"ipc://{tmp_path}/other" if is_replay else endpoint, **other)
        with pytest.raises(EndpointError, match="another process or object listens"):
            KVEventSubscriber(endpoint, binds=True)
        deadline = time.monotonic() + 20
        while not subscriber.poll(0.05):
            assert time.monotonic() < deadline
            first.publish([AllBlocksCleared()])
    with publish_at(endpoint):
        pass


def test_ipc_path_of_an_ended_process_is_used_again(tmp_path):
    path = tmp_path / "events"
    with tcp.socket(tcp.AF_UNIX) as ended:
        ended.bind(str(path))
    with publish_at(f"ipc://{path}"):
        pass


def test_ipc_path_with_a_file_is_refused(tmp_path):
    """ZeroMQ deletes the file."""
    path = tmp_path / "notes.txt"
    path.write_text("keep")
    with pytest.raises(EndpointError, match="a file that is no socket has this path"):
        publish_at(f"ipc://{path}")
    assert path.read_text() == "keep"


def test_stalled_subscriber_sees_its_losses_and_requests_them():
    num_batches = 60
    tokens = [70_000] * 100_000  # more than the operating system buffers for a reader
    with make_publisher(hwm=5, linger_s=0.0) as publisher, Requester(publisher.replay_endpoint) as requester:
        with subscribed(publisher, rcvhwm=5, rcvbuf=4096) as (stalled, first):
            for number in range(num_batches):
                publisher.publish([BlockStored([number], None, tokens, len(tokens), None, "GPU", None)])
            last = first + num_batches - 1
            requester.ask_until(last, last)  # all were sent: the publisher did not wait for the slow reader
            sequences = [stalled.receive()[0]]
            while stalled.socket.poll(100):
                sequences.append(stalled.receive()[0])
            publisher.publish([removed(0)])
            sequences.append(stalled.receive()[0])
        assert sequences[-1] == last + 1
        missed = sorted(set(range(first, last + 1)) - set(sequences))
        assert missed
        assert set(missed) <= {sequence for sequence, _ in requester.ask(missed[0])}


def test_garbage_on_the_ports_changes_nothing():
    with make_publisher() as publisher, subscribed(publisher) as (subscriber, first):
        for endpoint in (publisher.endpoint, publisher.replay_endpoint):
            host, port = endpoint.removeprefix("tcp://").split(":")
            for garbage in (
                b"GET / HTTP/1.1\r\n\r\n",
                b"\xff" * 10 + b"\x7f" + b"\x03" + b"\0" * 5_000,
                bytes(range(256)),
            ):
                with tcp.create_connection((host, int(port)), timeout=20) as connection:
                    connection.sendall(garbage)
        publisher.publish([removed(1)])
        assert subscriber.receive_numbers() == (first, [1])
        with Requester(publisher.replay_endpoint) as requester:
            assert requester.ask_for_sequences(first) == [first]
