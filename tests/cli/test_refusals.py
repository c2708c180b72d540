"""A command that cannot work says why in one line, ends with status 2 and writes nothing."""

import pytest
from cli.kv_pool_command import kv_pool_command
from lab.made_trace import record, write_trace

SIZE = "--trace-block-size 8"
REPLAY = f"replay trace.jsonl {SIZE} --blocks 20"
SWEEP = f"sweep trace.jsonl {SIZE} --blocks 50 --jobs 1"
BROKEN = f"broken.jsonl {SIZE} --blocks 50"
CURVE = f"curve trace.jsonl {SIZE}"
PLAN = f"plan trace.jsonl {SIZE} --num-layers 2 --num-kv-heads 1 --head-size 8"
COMPARE = f"compare trace.jsonl {SIZE} --jobs 1"
EVENTS = "events tcp://127.0.0.1:1"
SERVE = f"serve trace.jsonl {SIZE} --block-size 8"
NODE = f"{SERVE} --blocks 20"
CONVERT = f"trace convert {SIZE} -o x"
GENERATE = "trace generate chat --requests 9"
MERGE = f"trace merge trace.jsonl {SIZE} -o m.jsonl"

REFUSED = {
    f"replay nowhere.jsonl {SIZE} --blocks 10": "nowhere.jsonl: no such file",
    "replay photo.jpg --blocks 10": "photo.jpg:1: JSON is malformed",
    "replay . --blocks 10": "this is a folder; give one of its files; bundled traces: ",
    "replay - --blocks 10": "so it cannot come from standard input or a pipe",
    f"{REPLAY} --disk-tier 9 --tier-write never": "unknown tier_write 'never'; known are back, through",
    f"replay trace.jsonl {SIZE} --blocks 2": "the smallest request needs 3",
    f"replay trace.jsonl {SIZE} --blocks 10000000000": "a pool of 10,000,000,001 blocks needs 1,",
    f"replay trace.jsonl {SIZE} --memory much --model llama-3-8b": "'much' is not a size",
    f"replay trace.jsonl {SIZE} --blocks 5,9": "a replay has one capacity, not 2; use kv-pool sweep",
    f"{REPLAY} --host-blocks 9 --clock trace": "need the bytes of a block (--model or",
    f"{REPLAY} --host-tier 9 --clock trace": "need the bytes of a block (--model or",
    f"{REPLAY} --disk-rate slow": "'slow' is not a size",
    f"{REPLAY} --model llama-3-8b --num-layers 3": "pass either --model, or --num-layers",
    f"{REPLAY} --publish-config wrong.toml": "unknown field `topics`; known are endpoint",
    f"{REPLAY} --pace 3": "--pace is for events; pass --publish, too",
    f"{REPLAY} --publish tcp://127.0.0.1:0 --pace 0": "the pace is 0.0 requests per second; it must be above",
    f"{REPLAY} --publish-replay tcp://127.0.0.1:0": "publish_replay is for missed events; set publish, too",
    f"{REPLAY} --png x.png": "--png draws what --by lists; pass --by, too",
    f"{REPLAY} --by turn --png x.txt": "cannot write the picture: its name must end in one of",
    # An error about the second line of broken.jsonl would show that the work had started.
    f"replay {BROKEN} --json nowhere/r.json": "nowhere/r.json: cannot write the report: there is no",
    f"replay {BROKEN} --json folder.png": "folder.png: cannot write the report: it is a folder",
    f"replay {BROKEN} --requests nowhere/r": "nowhere/r: cannot write the requests: No such file",
    f"sweep {BROKEN} --json nowhere/r.json": "nowhere/r.json: cannot write the report: there is no",
    f"sweep {BROKEN} --png folder.png": "folder.png: cannot write the picture: it is a folder",
    f"sweep {BROKEN} --png curve.xyz": "curve.xyz: cannot write the picture: its name must end in",
    f"{SWEEP} --overlay earlier.json": "--overlay is drawn into the picture of --png; pass --png, too",
    f"{SWEEP} --host-tier some": "--host-tier: 'some' is not a whole number",
    f"{SWEEP} --memory 1GiB": "pass the capacity either as --blocks or as --memory",
    f"{CURVE} --blocks 4 --memory 1GiB": "pass the capacity either as --blocks or as --memory",
    f"{CURVE} --memory 1GiB": "--memory needs either --model",
    f"{CURVE} --blocks some": "--blocks: 'some' is not a whole number",
    f"{CURVE} --csv nowhere/c.csv": "nowhere/c.csv: cannot write the report: there is no folder",
    f"plan trace.jsonl {SIZE}": "a plan needs either --model, or --num-layers",
    f"{PLAN} --block-sizes some": "--block-sizes: 'some' is not a whole number",
    f"{PLAN} --png plan.xyz": "plan.xyz: cannot write the picture",
    f"{PLAN} --json plan.png --png ./plan.png": "two of --json, --csv and --png have the same path",
    "replay mooncake --blocks 9": "did you mean 'mooncake_conversation'? bundled traces:",
    f"{COMPARE} --policies optimun --blocks 12": "did you mean 'optimum'? known are lru, ",
    f"{COMPARE} --blocks 12": "pass one or more traces, and --policies",
    "compare --policies sieve --blocks 12": "pass one or more traces, and --policies",
    f"{COMPARE} --policies sieve": "pass the capacity either as --blocks or as --memory",
    f"{COMPARE} --policies sieve --blocks 12 --on slurm://a:1": "'slurm://a:1' is not an address such as",
    f"{COMPARE} --again trace.jsonl": "--again takes traces, policies and capacities from its file",
    f"{COMPARE} --policies sieve --blocks 12 --csv no/c.csv": "no/c.csv: cannot write the report",
    "events localhost:5557": "tcp://host:port",
    f"{EVENTS} --kind moved": "one of stored, removed, cleared",
    f"{EVENTS} tcp://127.0.0.1:2 --replay tcp://127.0.0.1:3": "one for each, or none",
    f"{EVENTS} --mirror --json": "--mirror shows a table",
    f"{EVENTS} --curve-secret-key mine.key_secret": "pass the publisher's --curve-server-key",
    f"{EVENTS} --curve-server-key none.key": "server key none.key: ",
    f"{EVENTS} --curve-server-key a --curve-server-key b": "1 endpoints and 2 times --curve-server-key; pass",
    "serve --config nowhere.toml": "nowhere.toml: cannot read the settings",
    "serve --config wrong.toml": "wrong.toml: unknown key 'publisher'; did you mean 'publish'? known are ",
    "serve --blocks 0": "blocks: Expected `int` >= 1",
    f"{SERVE} --blocks 2": "the smallest request needs 4",
    f"{SERVE} --blocks 10000000000 --socket here.sock": "GB are available",
    f"{SERVE} --socket {'x' * 108}": "a socket's path has at most 10",
    f"{SERVE} --socket trace.jsonl": "is not a socket and was left unchanged",
    f"{SERVE} --publish-replay tcp://127.0.0.1:0": "publish_replay is for missed events; set publish, too",
    f"{SERVE} --publish-config nowhere.toml": "nowhere.toml: cannot read the publisher's config",
    f"{SERVE} --port 0.0.0.0:0": "so it needs a token: pass --token-file FILE",
    f"{SERVE} --port nowhere": "'nowhere' is not a port; write PORT or HOST:PORT",
    f"{SERVE} --port 0 --token-file nowhere": "nowhere: cannot read the shared secret",
    f"{SERVE} --key key.pem": "key is an option of the panel Network; set port or web, too",
    f"{NODE} --listen 127.0.0.1:0": "listen is an option of the panel Nodes",
    f"{NODE} --peer b=127.0.0.1:1": "peer is an option of the panel Nodes; set name, too",
    f"{NODE} --name a/b": "'a/b' is not a valid node name",
    f"{NODE} --name a --peer b": "'b' is not a peer; write name=host:port",
    f"{NODE} --name a --listen nowhere": "'nowhere' is not a node address",
    f"{NODE} --name a --nodes nowhere.toml": "nowhere.toml: cannot read the nodes",
    f"{NODE} --name a --registry b": "node 'b' is unknown",
    f"{NODE} --name a --registry 127.0.0.1:1": "127.0.0.1:1: cannot connect",
    f"{NODE} --name a --secret-file nowhere": "nowhere: cannot read the shared secret",
    f"{NODE} --name a --block-bytes 0": "block_bytes: Expected `int` >= 1",
    f"{NODE} --name a --max-rate 0": "the rate '0' is below 1 byte per second",
    f"{GENERATE} -o nowhere/x": "nowhere/x: cannot write the trace: there is no folder",
    f"{MERGE} short.jsonl --names a,": "--names 'a,' contains an empty name",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("refused")
    write_trace(made / "trace.jsonl", [record(24, [1, 2, 3], 5, 0), record(32, [1, 2, 4, 5], 9, 10)])
    write_trace(made / "short.jsonl", [record(8, [1])])
    write_trace(made / "broken.jsonl", [record(24, [1, 2, 3]), record(32, [1])])
    (made / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0" * 100)
    (made / "wrong.toml").write_text('[publisher]\ntopics = "kv"\n')
    (made / "folder.png").mkdir()
    (made / "kv_pool").mkdir(0o700)  # of the sockets of nodes
    return made


@pytest.mark.parametrize("arguments", REFUSED)
def test_refusal_is_one_line_with_status_2_and_writes_nothing(folder, arguments):
    files = sorted(folder.iterdir())
    done = kv_pool_command(*arguments.split(), cwd=folder, XDG_RUNTIME_DIR=str(folder))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.strip().splitlines() if not line.startswith("warning: ")]
    assert line.startswith("error: ")
    assert REFUSED[arguments] in line
    assert sorted(folder.iterdir()) == files
