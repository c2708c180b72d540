"""Arbitrary bytes over a control socket or a network port."""

import json
import select
import socket
from contextlib import suppress

STATS = b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\n\r\n"


class RawClient:
    """A client that sends any bytes and reads HTTP answers. `address` is a path, or a host and a port."""

    def __init__(self, address):
        is_tcp = isinstance(address, tuple)
        self._socket = socket.socket(socket.AF_INET if is_tcp else socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(30)
        self._socket.connect(address if is_tcp else str(address))
        self._answers = self._socket.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._answers.close()
        self._socket.close()

    def send(self, data):
        with suppress(BrokenPipeError, ConnectionResetError):  # a refusal can be read even so
            self._socket.sendall(data)

    def wait_for_hang_up(self):
        """Wait, without reading, until the server has closed the connection."""
        poll = select.poll()
        poll.register(self._socket, 0)
        assert poll.poll(30_000), "the server did not close the connection"

    def read(self):
        """Return the status and the content of the next answer; None if the connection is closed."""
        try:
            first = self._answers.readline()
        except ConnectionResetError:
            return None
        if not first:
            return None
        length = 0
        while (line := self._answers.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return int(first.split()[1]), json.loads(self._answers.read(length))

    def ask(self, data):
        self.send(data)
        return self.read()
