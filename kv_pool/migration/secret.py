"""The shared secret of nodes, stored in a file that only its owner can read, and the keys derived from it."""

import hashlib
import os
from pathlib import Path

from kv_pool.errors import InvalidArgumentError
from kv_pool.regular_files import check_private, open_regular

MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096
_NEW_SECRET_BYTES = 32


def load_secret(path: str | Path) -> bytes:
    """Return the content of the file without surrounding white space, 16 to 4096 bytes.

    Raises:
        InvalidArgumentError: the file cannot be read, or the secret is too short or too long. On POSIX also
            if the file belongs to another user than root, or users other than its owner can access it.
    """
    place = Path(path)
    try:
        descriptor = open_regular(place)
        if os.name == "posix":
            check_private(descriptor, str(place), 0o077, "access", f"chmod 600 {place}", trusted=(0,))
        with open(descriptor, "rb") as file:
            content = file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(
            f"{place}: cannot read the shared secret: {error.strerror}. Create one with write_secret_file "
            "and copy it to every node"
        ) from error
    if len(content) > _MAX_SECRET_BYTES:
        raise InvalidArgumentError(
            f"{place}: the shared secret is longer than the maximum of {_MAX_SECRET_BYTES} bytes"
        )
    return check_secret(content.strip(), f"{place}: ")


def check_secret(secret: bytes, where: str = "") -> bytes:
    """Return the secret. Raises InvalidArgumentError for fewer than 16 bytes."""
    if len(secret) < MIN_SECRET_BYTES:
        raise InvalidArgumentError(
            f"{where}the shared secret has {len(secret)} bytes; it needs at least {MIN_SECRET_BYTES} random "
            "bytes"
        )
    return secret


def derive_curve_pair(secret: bytes) -> tuple[bytes, bytes]:
    """Return the public and the secret CURVE key of all nodes with this secret, clients and servers, as text.

    Raises:
        InvalidArgumentError: a secret of fewer than 16 bytes, or this libzmq has no CURVE support.
        MissingDependencyError: pyzmq is not installed.
    """
    check_secret(secret)
    from kv_pool.events.sockets import zmq

    if not zmq.has("curve"):
        raise InvalidArgumentError("this libzmq has no CURVE support; install pyzmq from its wheel")
    secret_key = zmq.utils.z85.encode(
        hashlib.blake2b(secret, digest_size=32, person=b"kv_pool nodes").digest()
    )
    return zmq.curve_public(secret_key), secret_key


def write_secret_file(path: str | Path) -> None:
    """Create a file with a new secret, 64 random hex digits, that only its owner can read and write.

    Raises:
        InvalidArgumentError: the path already exists and is unchanged, or the file cannot be created.
    """
    place = Path(path)
    try:
        handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(os.urandom(_NEW_SECRET_BYTES).hex().encode() + b"\n")
    except OSError as error:
        raise InvalidArgumentError(
            f"{place}: cannot create a file for the shared secret: {error.strerror}"
        ) from error
