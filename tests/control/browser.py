"""Headless Chromium, driven by its DevTools protocol over a pair of pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

_TIMEOUT_S = 30


class Browser:
    """A Chromium with one tab and its profile in `folder`. It remembers errors, refusals and warnings."""

    def __init__(self, folder):
        read_end, self._commands = os.pipe()
        self._replies, write_end = os.pipe()
        options = [
            "--headless",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
        ]
        # Chromium reads commands from descriptor 3 and writes replies to descriptor 4.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read_end} 4>&{write_end}', "bash", CHROMIUM, *options],
            pass_fds=[read_end, write_end],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_end)
        os.close(write_end)
        self._received = b""
        self._last_id = 0
        self._session = {}
        self.complaints = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._session = {}
        self.call("Browser.close")
        self._process.wait(_TIMEOUT_S)
        os.close(self._commands)
        os.close(self._replies)

    def call(self, method, **params):
        """Return the result of a method of the protocol."""
        self._last_id += 1
        command = {"id": self._last_id, "method": method, "params": params, **self._session}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (message := self._read()).get("id") != self._last_id:
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(message["params"]))
        assert "error" not in message, message["error"]
        return message["result"]

    def _read(self):
        while b"\0" not in self._received:
            assert select.select([self._replies], [], [], _TIMEOUT_S)[0], "the browser does not answer"
            part = os.read(self._replies, 1 << 20)
            assert part, "the browser has ended"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def show(self, url, *, width=1600, height=1000, scheme="light"):
        """Open a page in a window of this width, in the light or the dark scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, expression):
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression, timeout_s=_TIMEOUT_S):
        """Wait until a JavaScript expression is true in the page, and return its value."""
        until = time.monotonic() + timeout_s
        while not (value := self.run(expression)):
            shown = self.run("document.body?.innerText")
            assert time.monotonic() < until, f"{expression} stays {value!r}: {shown}"
            time.sleep(0.05)
        return value

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def take_screenshot(self, path):
        """Write a picture of the whole page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
