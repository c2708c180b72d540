"""The web page of a running pool, in headless Chromium: what its live DOM says."""

import socket
from importlib.resources import files

import pytest
from adapter.made_pool import make, take
from cli.running_commands import serving
from control.browser import CHROMIUM, Browser
from control.made_layout import make_sixteen
from control.test_controlled_manager import Served, make_prompt
from lab.made_trace import record, write_trace

from kv_pool.control import ControlServer, NetworkPort
from kv_pool.control.page import load_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

TOKEN = "0123456789abcdef+/0123456789abcdef=&"
COLOURS = {"light": ["#1a1e24", "rgb(247, 248, 250)"], "dark": ["#e8ecf1", "rgb(16, 20, 25)"]}
IS_LIVE = "document.body.dataset.link === 'live'"
IS_LOST = "document.body.dataset.link === 'lost'"
IS_CUT = "(one) => one.scrollWidth > one.clientWidth"
HOSTILE = '<img src=x onerror="document.title=1">&amp;\u2028'  # ends a line in JavaScript, but not in JSON


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def serve(tmp_path):
    """Return a function that serves a pool and its page; what it returns is a server to enter."""

    def make_server(pool, port=0, **options):
        path = tmp_path / "c.sock"
        return ControlServer(pool, path, port=NetworkPort(port=port), web=True, **options)

    return make_server


def read(browser, element_id):
    return browser.run(f"document.getElementById('{element_id}').innerText")


def read_map(browser):
    """Return the states of the cells by the colours of the picture, as in `made_layout.STATES`."""
    return browser.run("""(() => {
        const { columns, side } = measureMap();
        const copy = make("canvas", { width: 2000, height: 2000 });
        const pen = copy.getContext("2d", { willReadFrequently: true });
        pen.drawImage(byId("map"), 0, 0);
        const signs = KINDS.map(({ colour: name }) => {
            pen.fillStyle = colour(name);
            return pen.fillStyle;
        });
        return latest.map.cells.map((_, position) => {
            const [x, y] = [(position % columns) * side, Math.floor(position / columns) * side];
            const pixels = pen.getImageData(x + 1, y + 1, side - 3, side - 3).data;
            const digits = [...pixels].map((one) => one.toString(16).padStart(2, "0")).join("");
            const seen = new Set(digits.match(/.{8}/g).map((one) => `#${one.slice(0, 6)}`));
            return signs.flatMap((sign, kind) => seen.has(sign) ? [".*#P"[kind]] : []).join("/");
        }).join("");
    })()""")


def test_the_page_shows_the_pool_and_follows_it(browser, serve):
    pool = make_sixteen()
    with serve(pool) as server:
        browser.show(server.url)
        browser.wait_for(IS_LIVE)
        assert read_map(browser) == "####P#**...#*#.."
        assert read(browser, "legend").splitlines() == [
            "in use, held in place: 6.3 %",
            "in use: 43.8 %",
            "cached: 18.8 %",
            "empty: 31.3 %",
        ]
        assert "In use\n50.0 %\n8 of 16 blocks" in read(browser, "figures")
        take(pool, 2**62 + 1, 5)
        browser.wait_for("byId('figures').innerText.includes('13 of 16 blocks')")
        assert read_map(browser).count("#") == 12
        assert str(2**62 + 1) in read(browser, "sequences")
        browser.run("byId('pause').click()")
        pool.free_sequence(2**62 + 1)
        # A page that is paused has still received this.
        browser.wait_for("recent.at(-1).used_blocks === 8")
        assert "13 of 16 blocks" in read(browser, "figures")
        browser.run("tell('lost', 'Connection lost')")
        browser.wait_for("byId('connection').textContent === 'Paused'")  # when it has come back
    assert browser.complaints == []


def test_the_curve_begins_with_the_history_of_the_server(browser, serve):
    pool = make(16)
    take(pool, 1, 2)
    pool.cache_prefix(1, [b"a", b"b"])
    with serve(pool) as server:
        for sequence_id in range(2, 6):
            pool.claim_prefix(sequence_id, [b"a", b"b", b"c"])
            server._commands.monitor.log_allocation_state()
        browser.show(server.url)
        browser.wait_for(IS_LIVE)
        shares = browser.run("points.map((one) => one.overall).filter((one) => !isUnknown(one))")
        assert len(shares) >= 5
        assert set(shares) == {2 / 3}
        assert browser.run("points.every((one, at) => !at || one.time >= points[at - 1].time)")
    assert browser.complaints == []


def test_a_pool_without_anything_says_so_in_words(browser, serve):
    with serve(make(16)) as server:
        browser.show(server.url)
        browser.wait_for(IS_LIVE)
        words = {
            "evictions": "No cached block has been evicted.",
            "sequences": "No sequence has blocks.",
            "tiers": "This pool has no lower tiers.",
            "events": "This pool does not publish its events.",
            "nodes": "This pool is not a node.",
            "migrations": "This pool is not a node, so nothing migrates.",
            "holds": "No block is held.",
        }
        assert {name: read(browser, name).split("\n")[-1] for name in words} == words
        assert "undefined" not in browser.run("document.body.innerText")
        assert "NaN" not in browser.run("document.body.innerText")


def test_what_a_pool_does_not_count_is_unknown_and_not_0(browser, serve):
    unknown = [
        *("looked_up_tokens", "hit_tokens", "num_sequences", "evicted_sequences", "cached_blocks"),
        *("fragmentation_rate", "largest_free_run"),
    ]
    with serve(make(16)) as server:
        browser.show(server.url)
        browser.wait_for(IS_LIVE)
        nothing = ", ".join(f"{name}: null" for name in unknown)
        view = f"{{...latest, reading: {{...latest.reading, {nothing}}}, sequences: null, prefixes: null}}"
        browser.run(f"isPaused = true, latest = {view}, recent = [], keep(latest.reading), show()")
        assert read(browser, "curve-note") == "This pool does not count look-ups, so its hit rate is unknown."
        for name in ("sequences", "prefixes"):
            assert read(browser, name).endswith("This pool does not know its sequences.")
        assert "Hit rate\n–\nnot counted" in read(browser, "figures")
        assert "Sequences\nunknown" in read(browser, "figures")
        assert "Fragmentation\nnot measured" in read(browser, "figures")


def test_names_from_the_pool_are_text(browser, serve):
    served = Served()
    served.engine.start(HOSTILE + 500 * "x", make_prompt(1))
    with serve(served.face) as server:
        browser.show(server.url)
        browser.wait_for(IS_LIVE)
        assert HOSTILE in read(browser, "sequences")
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert browser.run("document.querySelector('#sequences tbody tr').offsetHeight") < 100


def test_the_page_survives_a_server_that_stops_and_one_that_starts(browser, serve):
    pool = make(16)
    take(pool, 1, 4)
    with serve(pool) as server:
        browser.show(server.url)
        browser.wait_for(IS_LIVE)
        port = server.url.rpartition(":")[2].rstrip("/")
    browser.wait_for(IS_LOST)
    assert read(browser, "connection") == "Connection lost: the server has stopped. Trying again."
    assert "4 of 16 blocks" in read(browser, "figures")  # the last ones, marked as such
    with serve(make(16), int(port)):
        browser.wait_for(IS_LIVE)
        assert read(browser, "connection").startswith("Live again since ")
        assert "0 of 16 blocks" in read(browser, "figures")


def test_the_page_survives_a_killed_server_and_names_its_node(browser, tmp_path):
    write_trace(tmp_path / "trace.jsonl", [record(24, [1, 2, 3], 5, 0)])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sizes = "--blocks", "40", "--block-size", "8", "--trace-block-size", "8"
    command = "trace.jsonl", *sizes, "--name", "a", "--web", "--port", str(port)
    with serving(*command, cwd=tmp_path) as process:
        assert process.stdout.readline() == f"its page is at http://127.0.0.1:{port}/\n"
        browser.show(f"http://127.0.0.1:{port}/")
        browser.wait_for("byId('name').textContent === 'Node a'")
        assert "It knows no other node." in read(browser, "nodes")
        process.kill()
        browser.wait_for(IS_LOST)
    with serving(*command, cwd=tmp_path):
        browser.wait_for(IS_LIVE)
        assert read(browser, "connection").startswith("Live again since ")


def test_the_token_is_in_the_fragment_only_and_is_asked_for(browser, tmp_path):
    port = NetworkPort(token=TOKEN)
    with ControlServer(make(16), tmp_path / "c.sock", port=port, web=True) as server:
        browser.show(server.url)
        browser.wait_for("!byId('refused').hidden")
        assert "token" in read(browser, "refusal")
        browser.run(f"byId('token').value = '{TOKEN}'")
        browser.run("document.querySelector('#refused button').click()")
        browser.wait_for(IS_LIVE)
        browser.run("sessionStorage.clear()")
        browser.show("about:blank")
        browser.show(f"{server.url}#token={TOKEN.replace('&', '%26')}")
        browser.wait_for(IS_LIVE)
        assert browser.run("location.href") == server.url
        assert browser.run("document.cookie") == ""
        assert server.refusals["token"] == 1


@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_window(browser, serve, width, scheme):
    pool = make(2000)
    for number in range(40):
        take(pool, 10**15 + number, 40)
    with serve(pool) as server:
        browser.show(server.url, width=width, scheme=scheme)
        browser.wait_for(IS_LIVE)
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        assert browser.run(f"[...document.querySelectorAll('.scroll')].filter({IS_CUT}).length") == 0
        assert "priority" not in read(browser, "sequences")  # that of all is 0
        colours = browser.run("[colour('--ink'), getComputedStyle(document.body).backgroundColor]")
        assert colours == COLOURS[scheme]


def test_the_map_is_read_with_the_keyboard(browser, serve):
    with serve(make_sixteen()) as server:
        browser.show(server.url)
        browser.wait_for(IS_LIVE)
        browser.run("byId('map').focus()")
        for _ in range(5):
            browser.press("ArrowRight")
        assert read(browser, "cell") == "Block 5: in use, held in place"
        assert browser.run("byId('map').getAttribute('aria-valuetext')") == "Block 5: in use, held in place"


def test_the_page_is_confined_to_its_server():
    page = load_page()
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert b"://" not in page.body.replace(b"http://www.w3.org/", b"")
    source = files("kv_pool.control").joinpath("page.html").read_text()
    assert len(source.splitlines()) < 600
