"""Bytes over a control socket, as no client of ours would send them."""

import json
import select
import socket


class RawClient:
    """Sends whatever it is told to, and reads replies as lines."""

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
        """Read nothing, and return when the server has hung up."""
        poll = select.poll()
        poll.register(self._socket, 0)
        assert poll.poll(30_000), "the server did not hang up"

    def read(self):
        """The next reply, or None when the server has hung up."""
        line = self._lines.readline()
        return json.loads(line) if line else None

    def ask(self, data):
        self.send(data)
        return self.read()
