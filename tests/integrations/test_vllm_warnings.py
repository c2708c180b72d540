"""A warning is in the log of each process of vLLM, which calls plugins before it configures logging."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import kv_pool

PRELUDE = """
import logging, os
from kv_pool.integrations.vllm_warnings import warn

def configure_logging():
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("(%(processName)s) %(levelname)s %(message)s"))
    logging.getLogger("vllm").addHandler(handler)
    logging.getLogger("vllm").propagate = False

vllm = logging.getLogger("vllm.v1.engine")
"""


def run(code):
    """Return the lines that the code writes to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(kv_pool.__file__).parent.parent)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_warning_with_logging_configured_is_logged_once():
    code = """
        configure_logging()
        warn("no level manger")
        warn("no level manger")
        vllm.warning("runs")
    """
    assert run(code) == ["(MainProcess) WARNING no level manger", "(MainProcess) WARNING runs"]


def test_each_process_logs_an_early_warning_once_more():
    """A forked engine process does not call plugins."""
    code = """
        import multiprocessing

        def run_engine():
            vllm.warning("engine starts")
            vllm.warning("engine runs")

        warn("no level manger")
        logging.getLogger("other").warning("other")
        configure_logging()
        vllm.warning("starts")
        engine = multiprocessing.get_context("fork").Process(target=run_engine, name="EngineCore")
        engine.start()
        engine.join()
        vllm.warning("ends")
    """
    assert run(code) == [
        "no level manger",
        "other",
        "(MainProcess) WARNING no level manger",
        "(MainProcess) WARNING starts",
        "(EngineCore) WARNING no level manger",
        "(EngineCore) WARNING engine starts",
        "(EngineCore) WARNING engine runs",
        "(MainProcess) WARNING ends",
    ]
