"""vLLM's router (wheel `vllm-router`) in a separate process, in front of minimal engines.

Set up: `pip install vllm-router==0.1.17`. The router is started with `--policy kv_aware`; it needs workers
that answer `GET /health` and `POST /v1/completions`, which `AnsweringEngine` does. How many tokens of a
prompt the router believes a worker to hold is in its decision log (`--log-level debug`).
"""

import json
import re
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from events.deadlines import wait_until
from events.peers.busy_pool import BLOCK_SIZE
from events.peers.dynamo_indexer import find_free_port

MODEL = "a-model"
DECISION = re.compile(r"KV prefix decision .*?input_tokens=(\d+) .*?credited_prefix_tokens=(\d+)")
STYLE = re.compile(r"\x1b\[[0-9;]*m")


class AnsweringEngine(ThreadingHTTPServer):
    """An HTTP server of an engine that answers each completion with its own name."""

    daemon_threads = True

    def __init__(self, name):
        super().__init__(("127.0.0.1", 0), EngineHandler)
        self.name = name
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.thread = threading.Thread(target=self.serve_forever)
        self.thread.start()

    def __exit__(self, *_):
        self.shutdown()
        self.thread.join()
        self.server_close()


class EngineHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({} if self.path == "/health" else None)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "text": self.server.name, "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self.answer(
            {
                "id": "a",
                "object": "text_completion",
                "created": 0,
                "model": MODEL,
                "choices": [choice],
                "usage": usage,
            }
        )

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class VLLMRouter:
    """The router, configured with each engine's event stream: (engine, endpoint, replay endpoint)."""

    def __init__(self, log_path, sources):
        self.log_path = log_path
        self.port = find_free_port()
        self.num_asked = 0
        command = [sys.executable, "-m", "vllm_router.launch_router", "--policy", "kv_aware"]
        command += [
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--prometheus-port",
            str(find_free_port()),
        ]
        command += ["--worker-startup-check-interval", "1", "--log-level", "debug"]
        command += ["--kv-event-block-size", str(BLOCK_SIZE), "--kv-event-model", MODEL]
        command += ["--worker-urls", *(engine.url for engine, _, _ in sources)]
        for engine, endpoint, replay_endpoint in sources:
            command += ["--kv-event-source", f"{engine.url}={endpoint}"]
            command += ["--kv-event-replay-source", f"{engine.url}={replay_endpoint}"]
        with log_path.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        wait_until(self.is_up, "up", timeout_s=60)

    def is_up(self):
        assert self.process.poll() is None, self.log_path.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def route(self, prompt):
        """Send a prompt of token ids; return the name of the engine that answers."""
        self.num_asked += 1
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", body)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read())["choices"][0]["text"]

    def count_overlap(self, prompt):
        """Return the number of leading blocks of the chosen engine, from the router's decision log."""
        self.route(prompt)
        wait_until(lambda: len(self.list_decisions()) >= self.num_asked, "decided")
        num_tokens, num_credited = self.list_decisions()[-1]
        assert num_tokens == len(prompt)
        return num_credited // BLOCK_SIZE

    def count_overlaps(self, prompts):
        return [self.count_overlap(prompt) for prompt in prompts]

    def list_decisions(self):
        log = STYLE.sub("", self.log_path.read_text(errors="replace"))
        return [(int(tokens), int(credited)) for tokens, credited in DECISION.findall(log)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
