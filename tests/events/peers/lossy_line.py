"""A connection between a publisher and its readers that can drop batches, as a full queue does."""

import threading

import zmq


class LossyLine:
    """A forwarder of live batches that drops them while `loses` is set. Replays bypass it."""

    def __init__(self, endpoint):
        self.context = zmq.Context()
        self.source = self.context.socket(zmq.SUB)
        self.source.subscribe(b"")
        self.source.connect(endpoint)
        self.sink = self.context.socket(zmq.PUB)
        self.endpoint = f"tcp://127.0.0.1:{self.sink.bind_to_random_port('tcp://127.0.0.1')}"
        self.loses = threading.Event()
        self.num_passed = 0
        self.num_lost = 0
        self.is_closing = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        while not self.is_closing:
            if self.source.poll(20):
                frames = self.source.recv_multipart()
                if self.loses.is_set():
                    self.num_lost += 1
                else:
                    self.sink.send_multipart(frames)
                    self.num_passed += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_closing = True
        self.thread.join()
        self.context.destroy(linger=0)
