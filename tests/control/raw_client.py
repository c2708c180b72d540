"""Arbitrary bytes over a control socket."""

import json
import select
import socket


class RawClient:
    """A client that sends any bytes and reads replies as lines."""

    def __init__(self, path):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(30)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._lines.close()
        self._socket.close()

    def send(self, data):
        self._socket.sendall(data)

    def end_sending(self):
        self._socket.shutdown(socket.SHUT_WR)

    def wait_for_hang_up(self):
        """Wait, without reading, until the server has closed the connection."""
        poll = select.poll()
        poll.register(self._socket, 0)
        assert poll.poll(30_000), "the server did not close the connection"

    def read(self):
        """Return the next reply, or None if the server has closed the connection."""
        line = self._lines.readline()
        return json.loads(line) if line else None

    def ask(self, data):
        self.send(data)
        return self.read()
