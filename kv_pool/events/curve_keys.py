"""CURVE: the keys of a reader, and loading keys from files."""

import os
from os import PathLike, fspath
from typing import NamedTuple

from kv_pool.errors import InvalidArgumentError
from kv_pool.regular_files import open_regular

_KEY_BYTES = 40


class CurveKeys(NamedTuple):
    """The keys of a reader for an encrypted stream, in Z85, as in key files and `zmq.curve_keypair()`."""

    server_public_key: bytes
    public_key: bytes
    secret_key: bytes

    @classmethod
    def from_files(
        cls, server_key_file: str | PathLike[str], secret_key_file: str | PathLike[str] | None = None
    ) -> "CurveKeys":
        """Load the publisher's public certificate and the reader's secret one.

        Args:
            secret_key_file: None generates a new pair, which is enough for publishers without
                `curve_client_keys_dir`: they admit every reader that has their public key.
        Raises:
            InvalidArgumentError: a file that cannot be read or has no keys; the message names it.
            MissingDependencyError: pyzmq is not installed.
        """
        from kv_pool.events.sockets import zmq

        server_public_key = load_public_key("server key", server_key_file)
        if secret_key_file is None:
            return cls(server_public_key, *zmq.curve_keypair())
        return cls(server_public_key, *load_key_pair("secret key", secret_key_file))


def load_public_key(name: str, path: str | PathLike[str]) -> bytes:
    """Return the public key in a certificate file. Raises InvalidArgumentError, which states `name`."""
    public_key, _ = _load(name, path)
    return public_key


def load_key_pair(name: str, path: str | PathLike[str]) -> tuple[bytes, bytes]:
    """Return both keys of a secret certificate file. Raises InvalidArgumentError, as `load_public_key`."""
    public_key, secret_key = _load(name, path)
    if secret_key is None or len(secret_key) != _KEY_BYTES:
        raise InvalidArgumentError(
            f"{name} {path} has no key pair; "
            f"use the .key_secret file that zmq.auth.create_certificates writes"
        )
    return public_key, secret_key


def _load(name: str, path: str | PathLike[str]) -> tuple[bytes, bytes | None]:
    from kv_pool.events.sockets import zmq

    if not zmq.has("curve"):
        raise InvalidArgumentError(f"this libzmq has no CURVE support; omit {name} or install another")
    import zmq.auth

    try:
        os.close(open_regular(path))  # opening a pipe would block
        public_key, secret_key = zmq.auth.load_certificate(fspath(path))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{name} {path}: {error}") from error
    if len(public_key) != _KEY_BYTES:
        raise InvalidArgumentError(f"{name} {path}: the public key must have {_KEY_BYTES} characters of Z85")
    return public_key, secret_key
