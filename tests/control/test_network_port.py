"""The TCP port of a real server: who may read, what is refused, and clients that mean harm."""

import json
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from adapter.made_pool import make
from control.raw_client import STATS, RawClient

from kv_pool import ControlError, InvalidArgumentError
from kv_pool.control import ControlClient, ControlServer, NetworkPort

TOKEN = "sixteen bytes and more"
READY = {"is_ready": True, "checks": {"pool": "ok"}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "c.sock"


def find_address(server):
    host, _, port = server.url.strip("/").rpartition("//")[2].rpartition(":")
    return host, int(port)


def ask(server, target, *, method="GET", host="localhost", **headers):
    """Return the status and the content of one answer through the port."""
    named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    with RawClient(find_address(server)) as client:
        return client.ask(f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{named}\r\n".encode())


def test_port_without_a_token_answers_what_costs_little(path):
    with ControlServer(make(), path, port=NetworkPort()) as server:
        for host in ("localhost", "localhost:8080", "127.0.0.1:1", "[::1]:80", "LOCALHOST"):
            assert ask(server, "/ready", host=host) == (200, READY)
        assert ask(server, "/live", Sec_Fetch_Site="same-origin") == (200, {"is_live": True})
        assert server.refusals == {}


@pytest.mark.parametrize(
    ("request_of", "reason", "status"),
    [
        ({"target": "/ready", "host": "evil.example"}, "host", 403),
        ({"target": "/ready", "host": "localhost.evil.example:80"}, "host", 403),
        ({"target": "/ready", "host": "[localhost"}, "host", 403),
        ({"target": "/ready", "Sec_Fetch_Site": "cross-site"}, "site", 403),
        ({"target": "/ready", "Sec_Fetch_Site": "same-site"}, "site", 403),
        ({"target": "/v1/defrag", "method": "POST"}, "method", 403),
        ({"target": "/v1/layout"}, "token", 403),
        ({"target": "/v1/layout", "host": "localhost/?"}, "token", 403),
        ({"target": "/v1/nothing"}, "token", 403),
        ({"target": "/nothing"}, "path", 404),
        ({"target": "/live/"}, "path", 404),
        ({"target": "http://localhost/v1/layout"}, "path", 404),
        ({"target": "/v1%2flayout"}, "token", 403),
    ],
)
def test_request_through_the_port_is_refused_and_counted(path, request_of, reason, status):
    with ControlServer(make(), path, port=NetworkPort()) as server:
        found, content = ask(server, **request_of)
        assert (found, content["error"]) == (status, "ControlError")
        assert server.refusals == {reason: 1}
        assert server.pool.get_statistics().moved_blocks == 0


def test_port_with_a_token_asks_for_it_and_still_only_reads(path, tmp_path):
    secret = tmp_path / "token"
    secret.write_text(f"{TOKEN}\n")
    secret.chmod(0o600)
    with ControlServer(make(), path, port=NetworkPort(host="0.0.0.0", token=secret)) as server:
        for given in (f"Bearer {TOKEN}", f"bearer  {TOKEN} "):
            status, content = ask(server, "/v1/stats", host="pool.example", Authorization=given)
            assert (status, content["total_blocks"]) == (200, 10)
        wrong = [
            "",
            TOKEN,
            f"Bearer {TOKEN[:-1]}",
            f"Bearer {TOKEN}x",
            f"Basic {TOKEN}",
            "Bearer \xff",
        ]
        for given in wrong:
            assert ask(server, "/ready", Authorization=given)[0] == 401
        assert server.refusals == {"token": len(wrong)}
        assert ask(server, "/v1/defrag", method="POST", Authorization=f"Bearer {TOKEN}")[0] == 403


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 65536}, "port is 65536; it is 0 to 65535"),
        ({"host": "0.0.0.0"}, "other machines can reach .* --token-file FILE"),
        ({"host": "::"}, "other machines can reach"),
        ({"host": "pool.example"}, "other machines can reach"),
        ({"host": "10.0.0.1", "token": "short"}, "the token of the port: the shared secret has 5 bytes"),
        ({"token": f"{TOKEN}\n{TOKEN}"}, "no client can send this token"),
        ({"token": "ü" * 16}, "no client can send this token"),
        ({"token": Path("nowhere")}, "nowhere: cannot read the shared secret"),
        ({"key": "key.pem"}, "pass --certificate, too"),
    ],
)
def test_unsafe_port_is_refused_with_the_way_out(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        NetworkPort(**options)


@pytest.mark.parametrize("text", ["", "a", "127.0.0.1:", "-1", "²", "1:100000", "9" * 5000])
def test_text_that_names_no_port_is_refused(text):
    with pytest.raises(InvalidArgumentError, match="is not a port; write PORT or HOST:PORT"):
        NetworkPort.parse(text)


def test_number_beyond_the_last_port_is_refused():
    with pytest.raises(InvalidArgumentError, match="port is 65536; it is 0 to 65535"):
        NetworkPort.parse("1:65536")


def test_port_is_free_after_the_server_has_stopped(path):
    with ControlServer(make(), path, port=NetworkPort()) as server:
        host, port = find_address(server)
        with pytest.raises(ControlError, match="cannot listen there: Address already in use"):
            ControlServer(make(), path.with_name("other.sock"), port=NetworkPort(port=port)).start()
        assert [found.name for found in path.parent.iterdir()] == ["c.sock"]
        silent = RawClient((host, port))
    with silent:
        assert silent.read() is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))
    with ControlServer(make(), path, port=NetworkPort.parse(f"{host}:{port}")) as server:
        assert ask(server, "/ready") == (200, READY)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl on PATH")
def test_port_with_a_certificate_speaks_tls_and_limits_handshakes(path, tmp_path):
    files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"]
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        *files,
    ]
    subprocess.run([*made, "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"], check=True)
    port = NetworkPort(certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem", token=TOKEN)
    server = ControlServer(make(200_000), path, port=port, max_clients=2, timeout_s=1.5)
    with server, ControlClient(path) as owner:
        trusted = ssl.create_default_context(cafile=tmp_path / "cert.pem")
        asked = urllib.request.Request(f"{server.url}v1/layout", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(asked, context=trusted) as answer:
            assert len(json.load(answer)["states"]) > 200_000
        with RawClient(find_address(server)) as garbage:
            garbage.send(STATS)
            assert garbage.read() is None
        with RawClient(find_address(server)), RawClient(find_address(server)) as silent:
            with RawClient(find_address(server)) as third:
                assert third.read() is None
            assert owner.get_statistics().total_blocks == 200_000
            assert silent.read() is None
        while sum(server.refusals.values()) < 4:
            assert owner.get_statistics().total_blocks == 200_000
        assert server.refusals == {"handshake": 3, "clients": 1}
    with pytest.raises(ControlError, match="not usable for TLS"):
        ControlServer(make(), path, port=NetworkPort(certificate="nowhere.pem")).start()


def test_a_thousand_slow_clients_do_not_disturb_the_socket(path):
    with (
        ControlServer(make(), path, port=NetworkPort(), timeout_s=1.0) as server,
        ControlClient(path, timeout_s=5.0) as owner,
        ExitStack() as stack,
    ):
        for at in range(1000):
            slow = stack.enter_context(socket.create_connection(find_address(server)))
            stack.enter_context(slow).setblocking(False)
            if at % 100 == 0:
                assert owner.get_statistics().total_blocks == 10
            try:
                slow.send(b"GET /ready HTTP/1.1\r\nHost:"[: at % 30])
            except OSError:  # refused already
                slow.close()
        while sum(server.refusals.values()) < 1000:
            assert owner.get_statistics().total_blocks == 10
            time.sleep(0.05)
        assert set(server.refusals) == {"clients", "slow"}
        assert server.refusals["slow"] >= 64
        assert ask(server, "/ready") == (200, READY)
