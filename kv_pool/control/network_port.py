"""`NetworkPort`: a TCP port of the control server, and what it refuses."""

import hmac
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kv_pool.errors import ControlError, InvalidArgumentError
from kv_pool.migration.secret import check_secret, load_secret

_OPEN_PATHS = ("/v1/history", "/v1/reading", "/v1/view", "/v1/watch")


@dataclass(frozen=True, kw_only=True)
class NetworkPort:
    """A TCP port on which `ControlServer` answers, beside its Unix socket.

        ControlServer(pool, port=NetworkPort(port=9400))                                # this machine only
        ControlServer(pool, port=NetworkPort(host="0.0.0.0", port=9400, token=Path("token"),
                                             certificate="cert.pem", key="key.pem"))    # TLS

    Args:
        host: the address to bind; only processes of this machine reach the default.
        port: 0 for a free port; see `ControlServer.url`.
        token: the secret of clients, or the path of a file with it; see `read_token`. A client sends it as
            `Authorization: Bearer TOKEN`. The page is sent without one and asks for it.
        certificate, key: PEM files for TLS. Without them a token can be read on the way.
    Raises:
        InvalidArgumentError: the port is not 0 to 65535, other machines can reach the host and there is no
            token, as `read_token`, or there is a key without a certificate.

    The port only reads. Compaction and migration need the Unix socket, which only its owner can open.

    Every user and every browser of a machine can reach its loopback addresses. So without a token the port
    serves only what keeps the pool's lock for less than a millisecond: the page, `/metrics`, health,
    `/v1/history`, `/v1/reading`, `/v1/view` and `/v1/watch`. It refuses names of hosts other than
    `localhost`, to which the owner of a web site may have rebound its own name, and requests that a page of
    another site has made.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if self.port not in range(65536):
            raise InvalidArgumentError(f"port is {self.port}; it is 0 to 65535")
        if self.token is not None:
            object.__setattr__(self, "token", read_token(self.token))
        elif not _is_loopback(self._url_host):
            raise InvalidArgumentError(
                f"other machines can reach port {self.port} of {self.host}, so it needs a token: pass "
                "--token-file FILE, or token= to NetworkPort; or serve on 127.0.0.1 and forward the port, "
                "such as with ssh -L"
            )
        if self.key is not None and self.certificate is None:
            raise InvalidArgumentError("a key needs its certificate; pass --certificate, too")

    @classmethod
    def parse(cls, address: str, **options: str | Path | None) -> "NetworkPort":
        """Return the port at `[HOST:]PORT`. Raises InvalidArgumentError for other text, or as the class."""
        host, _, port = address.rpartition(":")
        if not (port.isascii() and port.isdecimal() and len(port) < 6):
            raise InvalidArgumentError(
                f"{address!r} is not a port; write PORT or HOST:PORT, such as 127.0.0.1:9400"
            )
        return cls(host=host.strip("[]") or cls.host, port=int(port), **options)

    def listen(self) -> socket.socket:
        """Return a socket that listens on the port. Raises ControlError if that is not possible."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listener = socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            raise ControlError(
                f"port {self.port} of {self.host}: cannot listen there: {error.strerror}; choose another"
            ) from error
        listener.setblocking(False)
        return listener

    def get_url(self, listener: socket.socket) -> str:
        """Return the address of the port's socket as a URL."""
        return f"http{'s' if self.certificate else ''}://{self._url_host}:{listener.getsockname()[1]}/"

    @property
    def _url_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def find_refusal(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str, str] | None:
        """Return the status, the reason and the message if a request is refused, otherwise None."""
        if self.token is None and not _is_loopback(headers.get("host", "")):
            return 403, "host", "this port answers to the names localhost, 127.0.0.1 and [::1]"
        if path == "/":  # the page has no data of the pool, and may be linked to
            return None
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, "site", "a page of another site has made this request"
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(given.strip().encode(), str(self.token).encode())
        if self.token is not None and not (is_right and scheme.lower() == "bearer"):
            return 401, "token", "this port needs its token; send Authorization: Bearer TOKEN"
        if method not in ("GET", "HEAD"):
            return 403, "method", "this port only reads; use the Unix socket to change the pool"
        if self.token is None and path.startswith("/v1/") and path not in _OPEN_PATHS:
            message = f"this port has no token, so {path} is available at the Unix socket only"
            return 403, "token", f"{message}; see kv-pool serve --token-file"
        return None


def read_token(token: str | Path) -> str:
    """Return a bearer token, or the one in a file, without surrounding white space.

    Raises:
        InvalidArgumentError: as `load_secret`, or a header of HTTP cannot carry the token.
    """
    if isinstance(token, Path):
        text = load_secret(token).decode(errors="replace")
    else:
        text = token.strip()
        check_secret(text.encode(errors="replace"), "the token of the port: ")
    if not (text.isascii() and text.isprintable()):
        raise InvalidArgumentError(
            f"{'the token' if text is token else token}: no client can send this token; use one line of "
            "printable ASCII, such as of openssl rand -hex 32"
        )
    return text


def _is_loopback(host: str) -> bool:
    """Return True if a host, written as in a URL, is this machine, whatever a name server says."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
