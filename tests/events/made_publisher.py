"""Publishers for tests, on free ports, closed at the end."""

from threading import Event

from kv_pool.events.event_publisher import PublisherConfig
from kv_pool.events.publisher import ZMQEventPublisher
from kv_pool.events.stream_state import StreamState

FREE_PORT = "tcp://127.0.0.1:0"


def make_publisher(state=None, clock=lambda: 1700000000.5, **settings):
    settings = {"endpoint": FREE_PORT, "replay_endpoint": FREE_PORT, "linger_s": 5.0} | settings
    return ZMQEventPublisher(PublisherConfig(**settings), state, clock)


class GatedState(StreamState):
    """A state that blocks the publisher's thread at its first batch until the gate is open."""

    def __init__(self):
        super().__init__()
        self.entered, self.gate = Event(), Event()

    def apply(self, events, sequence=None, *, packs_tokens=False):
        if events:
            self.entered.set()
            assert self.gate.wait(20)
        return super().apply(events, sequence, packs_tokens=packs_tokens)
