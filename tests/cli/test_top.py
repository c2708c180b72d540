"""`kv-pool top` beside real pools, recorded metrics and a real publisher; keys in a terminal; restarts."""

import json
import os
import pty
import select
import signal
import sys
import termios
import threading
import time
from contextlib import contextmanager, suppress
from fcntl import ioctl
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from struct import pack

import pytest
from adapter.made_pool import make, take
from cli.kv_pool_command import ask_pool, kv_pool_command
from cli.running_commands import BOUND_S, running, serving
from events.wire_publisher import WirePublisher

from kv_pool import BlockRemoved, BlockStored
from kv_pool.cli.top_screen import Choices, draw
from kv_pool.cli.top_sources import HIT, LOOKED_UP, Frame, Watched
from kv_pool.control import ControlServer
from kv_pool.events.event_publisher import PublisherConfig
from kv_pool.events.publisher import ZMQEventPublisher
from kv_pool.events.stream_state import StreamState
from kv_pool.metrics.prometheus import PoolMetrics, encode_metrics
from kv_pool.reports import PoolSources
from kv_pool.reports.pool_view import MapCell, PoolMap

HERE = Path(__file__).parent


@pytest.fixture
def pool():
    """Three sequences that share two cached blocks; blocks 1 and 2 of 20 are pinned."""
    pool = make(20)
    for sequence_id, num_new in ((1, 1), (2, 7), (3, 3)):
        hits = pool.claim_prefix(sequence_id, [b"a", b"b"])
        take(pool, sequence_id, 2 - len(hits) + num_new)
        pool.cache_prefix(sequence_id, [b"a", b"b"])
    pool.pin([1, 2])
    return pool


@contextmanager
def serving_metrics(texts):
    """Serve the last of these texts as `/metrics` to clients with the token; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            is_known = self.headers["Authorization"] in (None, "Bearer secret")
            self.send_response(200 if is_known and texts else 503)
            self.end_headers()
            self.wfile.write(texts[-1].encode() if is_known and texts else b"")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()
        thread.join()


def test_once_prints_a_pool_as_text(tmp_path, pool):
    lines = ask_pool(tmp_path, pool, "top", "--once").splitlines()
    assert lines[0].startswith("kv-pool top  here.sock ")
    assert lines[1] == "GPU     ████████████████░░░░░░░░ 65.0% in use, 0.0% cached, of 20 blocks"
    assert lines[2] == "hits    66.7% of all tokens"
    assert "pinned blocks 2" in lines[3]
    place = lines.index("map     cells of 1 blocks, _ empty = cached + partly # in use P held")
    assert lines[place + 1] == "PP###########_______"
    assert lines[place + 2 :] == [
        "hot prefixes      tokens  sequences",
        f"{ord('b'):016x}       8          3",
        "sequences  blocks  idle s  immovable blocks",
        *(line for line in lines[place + 5 :]),
    ]
    assert [line.split()[:2] for line in lines[place + 5 :]] == [["2", "9"], ["3", "5"], ["1", "3"]]


def test_json_has_a_frame_per_line(tmp_path, pool):
    options = ("--json", "--socket", "here.sock", "--interval", "0.05")
    with ControlServer(pool, tmp_path / "here.sock"), running(tmp_path, "top", *options) as process:
        frames = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.wait(BOUND_S) == 130
    assert {len(frame["map"]["cells"]) for frame in frames} == {20}
    assert frames[-1]["bars"] == [{"name": "GPU", "used": 13, "total": 20, "cached": 0, "unit": "blocks"}]
    assert frames[-1]["rates"][HIT] == 0
    assert [row["sequence_id"] for row in frames[-1]["tables"]["sequences"]] == [2, 3, 1]


@pytest.mark.parametrize(
    ("engine", "lines"),
    [
        (
            "vllm",
            [
                "GPU     ████████████████░░░░░░░░ 66.7% in use, of 39 blocks",
                "hits    65.5% of all tokens",
                "model tiny  requests running 2  preemptions 4  generation tokens 2,057",
            ],
        ),
        (
            "sglang",
            [
                "GPU     ██████████▒▒▒▒▒▒▒▒▒▒▒▒░░ 40.0% in use, 50.0% cached, of 500,000 tokens",
                "hits    25.0% of all tokens",
                "model meta-llama/Llama-3.1-8B-Instruct  cache hit rate 31.0%  running reqs 7  queue reqs 1  "
                "evicted 1,200  generation tokens 7,557,572",
            ],
        ),
    ],
)
def test_metrics_of_engines_are_shown(tmp_path, engine, lines):
    with serving_metrics([(HERE / f"metrics_of_{engine}.txt").read_text()]) as url:
        done = kv_pool_command("top", "--once", "--url", url, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    _, bar, hits, *words = done.stdout.splitlines()
    assert [bar, hits, "  ".join(words)] == lines


def test_engines_of_one_server_are_added(tmp_path):
    text = (HERE / "metrics_of_vllm.txt").read_text()
    with serving_metrics([text + text.replace('engine="0"', 'engine="1"')]) as url:
        frame = json.loads(kv_pool_command("top", "--once", "--json", "--url", url, cwd=tmp_path).stdout)
    (bar,) = frame["bars"]
    assert (bar["used"], bar["total"]) == pytest.approx((2 * 26, 2 * 39))
    assert frame["counters"][HIT] == 2 * 2176
    assert frame["levels"] == {"model": "tiny", "requests running": 4, "requests waiting": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<html>hello</html>", "has no metrics of kv_pool, vLLM or SGLang"),
        ("vllm:kv_cache_usage_perc NaN", "has no metrics of kv_pool, vLLM or SGLang"),
        ('vllm:num_requests_running{engine="0 1', "has no metrics of kv_pool, vLLM or SGLang"),
        ("vllm:num_requests_running many", "no metrics can be read at "),
        (None, "HTTP Error 503"),
    ],
)
def test_pages_without_metrics_are_refused(tmp_path, text, message):
    with serving_metrics([] if text is None else [text]) as url:
        done = kv_pool_command("top", "--once", "--url", url, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_metrics_of_a_pool_are_shown(tmp_path, pool):
    metrics = PoolMetrics([PoolSources(pool=pool, model_name="llama")])
    with serving_metrics([encode_metrics(metrics)[1].decode()]) as url:
        shown = kv_pool_command("top", "--once", "--url", url, cwd=tmp_path).stdout.splitlines()
    beside = ask_pool(tmp_path, pool, "top", "--once").splitlines()
    assert shown[1:3] == beside[1:3]
    words = "  ".join(beside[3 : beside.index(next(line for line in beside if line.startswith("map")))])
    assert set("  ".join(shown[3:]).split("  ")) - set(words.split("  ")) == {
        "model llama",
        "requests running 3",
    }


LARGE = "9" * 5000
ENGINES = """
vllm:kv_cache_usage_perc{engine="0"} 5e-324
vllm:kv_cache_usage_perc{engine="1"} 1e308
vllm:kv_cache_usage_perc{engine="2"} 1e308
vllm:cache_config_info{num_gpu_blocks="LARGE"} 1
vllm:cache_config_info{num_gpu_blocks="100"} 1e-320
vllm:prefix_cache_queries_total 1e308
vllm:prefix_cache_queries_total 1e308
vllm:num_requests_running{model_name="\x1b[31m\u202e{}"} 3
"""
POOLS = """
kv_pool_blocks{pool="a",state="used"} 0
kv_pool_tier_capacity_blocks{medium="CPU"} 0
kv_pool_fragmentation_ratio{pool="a"} 0.75
kv_pool_fragmentation_ratio{pool="b"} 0.5
kv_pool_block_size_tokens{pool="a"} 16
kv_pool_block_size_tokens{pool="b"} 16
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ENGINES.replace("LARGE", LARGE), "model \\x1b[31m\\u202e{}  requests running 3"),
        (POOLS, "block size tokens 16  fragmentation ratio 75.0%"),
    ],
)
def test_odd_metrics_are_shown(tmp_path, text, words):
    """Numbers that overflow and names that a terminal obeys; an empty pool, and two in one process."""
    with serving_metrics([text]) as url:
        done = kv_pool_command("top", "--once", "--url", url, cwd=tmp_path)
    assert words in done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("kind", ["endless", "redirecting"])
def test_a_server_that_is_not_to_be_trusted(tmp_path, kind):
    """One that answers without an end, and one that sends clients with their token elsewhere."""
    tokens = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            tokens.append((self.path, self.headers["Authorization"]))
            is_redirected = kind == "redirecting" and self.path == "/metrics"
            self.send_response(302 if is_redirected else 200)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            with suppress(OSError):
                while kind == "endless" and not is_ending.wait(0.1) and time.monotonic() < began_s + 20:
                    self.wfile.write(b"vllm:num_requests_running 1\n")
                self.wfile.write(b"vllm:num_requests_running 1\n" * (not is_redirected))

        def log_message(self, *_):
            pass

    is_ending, began_s = threading.Event(), time.monotonic()
    (tmp_path / "token").write_text("a token of many letters")
    (tmp_path / "token").chmod(0o600)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        try:
            done = kv_pool_command("top", "--once", "--url", url, "--token-file", "token", cwd=tmp_path)
        finally:
            is_ending.set()
            server.shutdown()
            thread.join()
    assert tokens[0] == ("/metrics", "Bearer a token of many letters")
    assert tokens[1:] == ([("/elsewhere", None)] if kind == "redirecting" else [])
    assert ("no end after" in done.stderr) == (kind == "endless"), done.stderr
    assert time.monotonic() - began_s < 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--url", "file:///etc/passwd"), "--url is 'file:///etc/passwd'; it is such as http://"),
        (("--url", "http://[::1/metrics"), "no metrics can be read at http://[::1/metrics: Invalid IPv6 URL"),
        (("--url", "http://127.0.0.1:9/metrics"), "no metrics can be read at http://127.0.0.1:9/metrics: "),
        (("--events", "ipc://nowhere"), "no publisher answers at ipc://nowhere"),
        (("--node", "a", "--events", "ipc://nowhere"), "pass one of --socket, --node, --url and --events"),
        (("--socket", "nowhere"), "no pool is served at nowhere"),
        (("--url", "http://[::1]:9/", "--token-file", "none"), "none: cannot read the shared secret"),
    ],
)
def test_a_source_that_does_not_answer_at_first_is_an_error(tmp_path, options, message):
    done = kv_pool_command("top", "--once", *options, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}")


@pytest.mark.parametrize("engine", ["kv_pool", "vllm"])
def test_events_are_mirrored(tmp_path, engine):
    stored = BlockStored([1, 2, 3], None, list(range(12)), 4, None, "GPU", None)
    config = PublisherConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    with WirePublisher() if engine == "vllm" else ZMQEventPublisher(config, StreamState()) as publisher:
        publisher.publish([stored])
        publisher.publish([BlockRemoved([3], "GPU")])
        ends = ("--events", publisher.endpoint, "--replay", publisher.replay_endpoint)
        done = kv_pool_command("top", "--once", *ends, cwd=tmp_path)
    assert done.stdout.splitlines()[-2:] == ["cached        blocks", "GPU, group 0       2"], done.stderr


def test_rates_are_never_negative_after_a_restart():
    counts = iter([(1, 0), (2, 10), (3, 40), (4, 5), (5, 15)])

    def look(_):
        now, count = next(counts)
        return Frame(time_s=now, counters={HIT: count, LOOKED_UP: 2 * count})

    watched = Watched("", look)
    frames = [watched.look(1) for _ in range(5)]
    assert [frame.rates.get(HIT) for frame in frames] == [None, 10, 20, None, 10]
    assert [frame.hit_rates for frame in frames] == [
        [None],
        [None, 0.5],
        [None, 0.5, 0.5],
        [None],
        [None, 0.5],
    ]


def test_restarted_servers_are_survived(tmp_path):
    sizes = ("--blocks", "400", "--speedup", "50", "--socket", "s")
    with (
        serving(*sizes, cwd=tmp_path) as first,
        running(tmp_path, "top", "--json", "--socket", "s", "--interval", "0.1") as top,
    ):

        def read_until(is_so):
            while not is_so(frame := json.loads(top.stdout.readline())):
                assert all(rate >= 0 for rate in frame["rates"].values())
            return frame

        before = read_until(lambda frame: frame["rates"])
        first.kill()
        gone = read_until(lambda frame: frame["trouble"])
        assert (gone["time_s"], gone["bars"]) >= (before["time_s"], before["bars"])
        assert read_until(lambda frame: frame["trouble"])["time_s"] == gone["time_s"]
        with serving(*sizes, cwd=tmp_path):
            read_until(lambda frame: frame["rates"])


class Terminal:
    """`kv-pool top` in a terminal of its own."""

    def __init__(self, folder, *options, columns=80, lines=24):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ.update(TERM="xterm-256color", PYTHONIOENCODING="utf-8", XDG_RUNTIME_DIR=str(folder))
            for name in ("COLUMNS", "LINES"):
                os.environ.pop(name, None)
            ioctl(0, termios.TIOCSWINSZ, pack("HHHH", lines, columns, 0, 0))
            os.execv(sys.executable, [sys.executable, "-P", "-m", "kv_pool", "top", *options])
        self.shown = ""

    def read_until(self, text):
        """Return what was printed up to this text."""
        deadline = time.monotonic() + BOUND_S
        while text not in self.shown:
            assert select.select([self.terminal], [], [], 10)[0], self.shown
            assert time.monotonic() < deadline, self.shown
            self.shown += os.read(self.terminal, 10_000).decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before

    def press(self, keys):
        os.write(self.terminal, keys.encode())

    def end(self):
        """Read the rest, and return the exit status and the rest."""
        while True:
            try:
                self.shown += os.read(self.terminal, 10_000).decode(errors="replace")
            except OSError:
                break
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.shown


def test_keys_in_a_terminal(tmp_path, pool):
    with ControlServer(pool, tmp_path / "here.sock"):
        terminal = Terminal(tmp_path, "--socket", "here.sock", "--interval", "0.1")
        terminal.read_until("\x1b[?1049h")  # the alternate screen
        terminal.read_until("q quit  space pause  s sort  / filter")
        terminal.press("s")
        terminal.read_until("blocks↓")
        terminal.press("\x1b[A")  # an arrow does nothing
        terminal.press("/")
        terminal.press("3q")
        terminal.read_until("/ 3q_")
        terminal.press("\x7f\r ")
        terminal.read_until("paused")
        take(pool, 7, 1)
        terminal.press(" \x1b")
        terminal.read_until("70.0% in use")
        terminal.press("q")
        status, rest = terminal.end()
    assert status == 0
    assert "\x1b[?1049l" in rest
    assert "\x1b[?25h" in rest


def test_tab_shows_the_next_pool_and_a_killed_one_is_reported(tmp_path):
    sizes = ("--blocks", "400", "--speedup", "50")
    with serving(*sizes, "--name", "a", cwd=tmp_path) as a, serving(*sizes, "--name", "b", cwd=tmp_path):
        terminal = Terminal(tmp_path)
        terminal.read_until("control-a.sock")
        terminal.read_until("tab next pool")
        terminal.press("\t")
        terminal.read_until("control-b.sock")
        terminal.press("\t")
        terminal.read_until("control-a.sock")
        a.kill()
        terminal.read_until("not connected: ")
        terminal.press("\x03")
        status, rest = terminal.end()
    assert status == 130
    assert "\x1b[?1049l" in rest
    assert "Traceback" not in rest


def test_a_killed_pool_does_not_hide_the_others(tmp_path):
    sizes = ("--blocks", "400", "--speedup", "50")
    with serving(*sizes, cwd=tmp_path) as first:
        first.kill()
        first.wait(BOUND_S)
    assert (tmp_path / "kv_pool" / "control.sock").exists()
    with serving(*sizes, "--name", "a", cwd=tmp_path), running(tmp_path, "top", "--once") as top:
        assert top.stdout.readline().startswith("kv-pool top  control-a.sock"), top.stderr.read()


def test_the_only_sequence_is_named_though_its_id_is_0(tmp_path):
    pool = make(20)
    take(pool, 0, 5)
    assert ask_pool(tmp_path, pool, "top", "--once").splitlines()[-1].split()[:2] == ["0", "5"]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 45), (20, 5), (8, 1)])
def test_a_screen_has_the_size_of_the_terminal(width, height, pool):
    frame = Frame(
        source="a" * 200,
        trouble="it \x1b[31m is away " * 9,
        tables={"sequences": [{"sequence_id": f"\x1b]0;{n}", "num_blocks": n} for n in range(1, 99)]},
    )
    lines = draw(frame, Choices(), width, height, "q quit")
    assert len(lines) == height
    text = "\n".join("".join(part for part, _ in line) for line in lines)
    assert "\x1b" not in text


def test_a_migration_is_named_in_a_narrow_terminal():
    """Its long id used to leave no room for the sequence that it moves."""
    status = {
        "subject": "sequence 6382000038",
        "direction": "out",
        "peer": "b",
        "phase": "reading",
        "num_done_blocks": 20,
        "num_blocks": 588,
        "bytes_per_s": 3903.4,
        "elapsed_s": 23.1,
        "migration_id": "e316ac9a1a07315c489359155455ccb2",
    }
    frame = Frame(tables={"migrations": [status]})
    heading, row = (line[0][0] for line in draw(frame, Choices(), 80, 24)[-2:])
    assert heading == "migrations           direction  peer    phase  done blocks  blocks  bytes per s"
    assert row.split() == ["sequence", "6382000038", "out", "b", "reading", "20", "588", "3,903.4"]
    assert status["migration_id"] in draw(frame, Choices(), 130, 24)[-1][0][0]
    narrow = draw(frame, Choices(), 24, 24)[-1][0][0]
    assert narrow.startswith("sequence 6")
    assert len(narrow) <= 24


def test_the_map_has_its_legend_in_a_narrow_terminal():
    frame = Frame(map=PoolMap(10**7, 41_667, [MapCell(0, 0, 1, 0)] * 240))
    heading, *rows = draw(frame, Choices(), 80, 24)[1:]
    assert "".join(text for text, _ in heading).endswith("P held")
    assert [sum(len(text) for text, _ in line) for line in (heading, *rows)] == [73, 80, 80, 80]
