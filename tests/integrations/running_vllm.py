"""vLLM's own server with a tiny real model on a CPU, in a session of its own (marker `engine`)."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from events.peers.dynamo_indexer import find_free_port
from integrations.vllm_process import TESTS, write_metadata

import kv_pool

BOUND_S = 300
OPTIONS = (
    "--served-model-name tiny --skip-tokenizer-init --dtype float32 --enforce-eager --max-model-len 512 "
    "--max-num-seqs 8 --max-num-batched-tokens 128 --block-size 32 --kv-cache-memory-bytes 67108864 "
    "--num-gpu-blocks-override 40 --enable-prompt-tokens-details"
)


def fetch(url, body=None, timeout_s=BOUND_S):
    """Return the text of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return answer.read().decode()


class VLLMServer:
    """A running `vllm serve`.

    Attributes:
        log: the file of its log.
        runtime: the folder of its control sockets.
    """

    def __init__(self, folder, *options, **environment):
        self.log = folder / "log"
        self.runtime = folder / "run"
        self.runtime.mkdir(parents=True)
        port = find_free_port()
        self.url = f"http://127.0.0.1:{port}"
        write_metadata(folder)
        ours = Path(kv_pool.__file__).parent.parent
        path = [os.environ.get("PYTHONPATH", ""), str(ours), str(TESTS), str(folder)]
        from integrations.engine_chats import make_model  # imports torch

        model = make_model("full attention", folder.parent)
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *OPTIONS.split()]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port), *options],
                env={
                    **os.environ,
                    "PYTHONPATH": ":".join(filter(None, path)),
                    "XDG_RUNTIME_DIR": str(self.runtime),
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": "1",
                    "TORCHDYNAMO_DISABLE": "1",
                    "VLLM_LOGGING_LEVEL": "INFO",
                    **environment,
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self):
        """Wait until it serves."""
        deadline = time.monotonic() + BOUND_S
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                return fetch(f"{self.url}/health", timeout_s=5)
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.2)

    def complete(self, prompt, **more):
        """Return the tokens of the answer to a prompt, and how many of the prompt's were cached."""
        body = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = json.loads(fetch(f"{self.url}/v1/completions", {**body, "return_token_ids": True, **more}))
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["token_ids"], cached

    def terminate(self):
        """Send SIGTERM to the server's process, and wait for its end."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=BOUND_S)


@contextmanager
def running_vllm(folder, *options, **environment):
    """Run a server; kill what remains of it at the end."""
    server = VLLMServer(folder, *options, **environment)
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait(timeout=BOUND_S)
