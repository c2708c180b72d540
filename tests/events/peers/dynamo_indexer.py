"""NVIDIA Dynamo's stand-alone indexer, from its wheel, in a separate process."""

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request

from events.deadlines import wait_until
from events.peers.busy_pool import BLOCK_SIZE

MODEL = "a-model"
ENGINE_ID = 1


def find_free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class DynamoIndexer:
    def __init__(self, log_path):
        self.log_path = log_path
        self.port = find_free_port()
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self.port), "--threads", "1"]
        with log_path.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        wait_until(self.is_up, "up")

    def is_up(self):
        assert self.process.poll() is None, self.log_path.read_text()
        try:
            self.ask("/health")
        except OSError:
            return False
        return True

    def ask(self, path, **asked):
        """Return its answer; {} if it is empty."""
        body = json.dumps(asked).encode() if asked else None
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read() or b"{}")

    def attach(self, endpoint, replay_endpoint):
        self.ask(
            "/register",
            instance_id=ENGINE_ID,
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            model_name=MODEL,
            block_size=BLOCK_SIZE,
        )

    def count_overlaps(self, prompts):
        """Return the number of leading blocks of each prompt that the indexer reports for the engine."""
        return [self.count_overlap(prompt) for prompt in prompts]

    def count_overlap(self, prompt):
        answer = self.ask("/query", token_ids=prompt, model_name=MODEL)
        return answer["scores"].get(str(ENGINE_ID), {}).get("0", 0) // BLOCK_SIZE

    def list_hashes(self):
        """Return all hashes that the indexer reports for the engine."""
        return {
            block["block_hash"]
            for index in self.ask("/dump").values()
            for stored in index["events"]
            for block in stored["event"]["data"]["stored"]["blocks"]
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
