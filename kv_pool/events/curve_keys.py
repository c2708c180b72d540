"""CURVE: the keys of a reader, the encryption of a publisher's sockets, and loading the keys from files."""

import os
from os import PathLike, fspath
from typing import TYPE_CHECKING, NamedTuple

from kv_pool.errors import InvalidArgumentError
from kv_pool.regular_files import open_regular
from kv_pool.threads import make_out_of_threads

if TYPE_CHECKING:
    import zmq
    from zmq.auth.thread import ThreadAuthenticator

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


class ServerCurve:
    """Encryption for the sockets of a publisher, and a thread that admits only the listed readers.

    Args:
        secret_key_file: the publisher's secret certificate, as `zmq.auth.create_certificates` writes it.
    Raises:
        InvalidArgumentError: a key file that cannot be used.
    """

    def __init__(self, secret_key_file: str) -> None:
        self._public_key, self._secret_key = load_key_pair("curve_secret_key_file", secret_key_file)
        self._authenticator: ThreadAuthenticator | None = None

    def encrypt(self, socket: "zmq.SyncSocket") -> None:
        """Set the keys of a socket that is not bound yet."""
        socket.curve_server = True
        socket.curve_publickey = self._public_key
        socket.curve_secretkey = self._secret_key

    def admit_only(self, context: "zmq.Context[zmq.SyncSocket]", keys_dir: str) -> None:
        """Start a thread that admits only the readers whose public keys are in a directory.

        Raises:
            InvalidArgumentError: a directory that cannot be read, or has no keys.
            OutOfThreadsError: the system cannot start the thread.
        """
        from zmq.auth import load_certificates
        from zmq.auth.thread import ThreadAuthenticator

        try:
            if not load_certificates(keys_dir):
                raise InvalidArgumentError("no .key file, so no reader could connect; add public keys")
            authenticator = self._authenticator = ThreadAuthenticator(context)
            try:
                authenticator.start()
            except Exception as error:
                _close_unused_pipes(authenticator)
                if isinstance(error, (RuntimeError, MemoryError)):
                    raise make_out_of_threads("kv_pool authenticator", error) from error
                raise
            authenticator.configure_curve(domain="*", location=keys_dir)
        except (OSError, ValueError) as error:
            raise InvalidArgumentError(f"curve_client_keys_dir {keys_dir}: {error}") from error

    def stop(self) -> None:
        """Stop the thread. Idempotent; call it before the context is terminated."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


def _close_unused_pipes(authenticator: "ThreadAuthenticator") -> None:
    """Close the sockets to a thread that does not run: `stop` would wait for it, and the context for them."""
    if not authenticator.is_alive():
        for owner in (authenticator, authenticator.thread):
            if owner is not None and owner.pipe is not None:
                owner.pipe.close(linger=0)
                owner.pipe = None  # type: ignore[assignment] # as its `stop` does


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
