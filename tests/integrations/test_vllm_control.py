"""The control socket of a vLLM engine core's pool: answers and refusals, also while the engine steps.

Uses the fake vLLM of `test_vllm_plugin`, in a separate process.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from integrations.test_vllm_plugin import FILES

import kv_pool

PRELUDE = """
import gc, logging, os, sys, threading
logged = []
class Keep(logging.Handler):
    def emit(self, record):
        logged.append((record.levelname, record.getMessage()))
logging.getLogger("vllm").addHandler(Keep())
logging.getLogger("vllm").setLevel("INFO")
from kv_pool import ControlError
from kv_pool.control import ControlClient
from kv_pool.integrations.vllm import register
register()
from vllm.v1.scheduler import Pool, SharedPool

def make_pool(num_blocks=10):
    return Pool(
        num_gpu_blocks=num_blocks, enable_caching=True, hash_block_size=4, enable_kv_cache_events=True
    )

def refusal(call, *arguments):
    try:
        call(*arguments)
    except ControlError as error:
        return str(error)
    raise AssertionError("it was not refused")
"""


@pytest.fixture
def run(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(content))

    def run_code(code, control):
        ours = Path(kv_pool.__file__).parent.parent
        told = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=60,
            env={
                **os.environ,
                "PYTHONPATH": f"{tmp_path}:{ours}",
                "XDG_RUNTIME_DIR": str(tmp_path),
                "VLLM_PLUGINS": "kv_pool",
                "KV_POOL_VLLM_CONTROL": control,
            },
        )
        assert told.returncode == 0, told.stderr
        assert "Traceback" not in told.stderr
        assert not list(tmp_path.rglob("*.sock")), "the socket has outlived its process"
        return told.stdout

    return run_code


def test_answers_describe_the_pool_of_the_engine(run):
    run(
        """
        pool = make_pool()
        blocks = pool.get_new_blocks(4)
        pool.reset_prefix_cache()
        pool.free_blocks(blocks[3:])
        assert pool.reset_prefix_cache() is False
        hold = pool.hold(blocks[:1], "leased to a connector")
        with ControlClient("here.sock") as client:
            told = client.get_statistics()
            assert (told.total_blocks, told.block_size) == (9, 4)
            assert (told.used_blocks, told.immovable_blocks) == (3, 1)
            assert (told.num_sequences, told.allocation) == (None, None)
            assert list(client.get_layout().states) == [0, 4, 3, 3, 1, 1, 1, 1, 1, 1]
            [found] = client.list_holds().holds
            assert (found.reason, found.block_ids) == ("leased to a connector", [1])
            hold.release()
            pool.free_blocks(blocks[:3])
            assert pool.reset_prefix_cache() is True
            assert client.get_statistics().queued_events == 1
            assert [type(event).__name__ for event in pool.take_events()] == ["AllBlocksCleared"]
            told = client.get_statistics()
            assert (told.queued_events, told.taken_events) == (0, {"AllBlocksCleared": 1})
        """,
        "here.sock",
    )


def test_statistics_of_level_pool_have_the_hit_rate(run):
    """Hits, and prompt blocks that had to be computed, are what the pool sees of the look-ups."""
    run(
        """
        from types import SimpleNamespace
        pool = Pool(num_gpu_blocks=10, enable_caching=True, hash_block_size=4)
        request = SimpleNamespace(
            request_id="r", num_prompt_tokens=13, block_hashes=[b"1", b"2", b"3", b"4"],
            all_token_ids=range(16), lora_request=None, sampling_params=None,
            mm_features=None, cache_salt=None,
        )
        blocks = pool.get_new_blocks(4)
        words = {"block_size": 4, "kv_cache_group_id": 0}
        pool.cache_full_blocks(request, blocks, num_cached_blocks=0, num_full_blocks=2, **words)
        with ControlClient("here.sock") as client:
            told = client.get_statistics()
            assert (told.hit_blocks, told.looked_up_blocks) == (0, 2)
            pool.cache_full_blocks(request, blocks, num_cached_blocks=2, num_full_blocks=4, **words)
            pool.free_blocks(blocks)
            pool.touch([pool.null_block, *blocks[:2]])
            told = client.get_statistics()
            assert (told.hit_blocks, told.looked_up_blocks, told.pinned_blocks) == (2, 5, 0)
        """,
        "here.sock",
    )


def test_commands_that_move_bytes_are_rejected_with_a_reason(run):
    run(
        """
        pool = make_pool()
        with ControlClient("here.sock") as client:
            assert "blocks of vLLM cannot be moved" in refusal(client.defragment)
            assert "blocks of vLLM cannot be moved" in refusal(client.migrate, 1, "b")
            assert "are in vLLM's scheduler, not in the pool" in refusal(client.describe_sequences)
            assert client.get_statistics().total_blocks == 9
        """,
        "here.sock",
    )


def test_setting_1_opens_the_default_socket_of_the_process(run):
    run(
        """
        pool = make_pool()
        with ControlClient(node=f"vllm-{os.getpid()}") as client, ControlClient() as other:
            assert client.get_statistics() == other.get_statistics()
        [message] = [text for level, text in logged if "kv-pool stats --socket" in text]
        """,
        "1",
    )


@pytest.mark.parametrize("control", ["", "0"])
def test_no_socket_and_no_lock_by_default(run, control):
    run(
        """
        pool = make_pool()
        assert not hasattr(pool, "control")
        assert not os.path.exists("0")
        assert refusal(ControlClient)
        """,
        control,
    )


def test_socket_is_removed_with_its_pool(run):
    run(
        """
        pool = make_pool()
        del pool
        gc.collect()
        assert not os.path.exists("here.sock")
        pool = SharedPool(num_gpu_blocks=20, enable_caching=True, hash_block_size=4, owner="me")
        with ControlClient("here.sock") as client:
            assert client.get_statistics().total_blocks == 19
        """,
        "here.sock",
    )


def test_socket_in_use_logs_a_warning_and_the_engine_continues(run):
    run(
        """
        first, second = make_pool(), make_pool(20)
        [(level, message)] = [one for one in logged if "not open a control socket" in one[1]]
        assert level == "WARNING" and "is served at here.sock already" in message
        assert message.endswith("With KV_POOL_VLLM_CONTROL=1 each engine process has its own")
        assert len(second.get_new_blocks(3)) == 3
        with ControlClient("here.sock") as client:
            assert client.get_statistics().total_blocks == 9
        """,
        "here.sock",
    )


def test_socket_answers_while_the_engine_steps(run):
    run(
        """
        pool = make_pool(200)
        is_over = threading.Event()
        errors = []

        def ask():
            try:
                with ControlClient("here.sock") as client:
                    for _ in range(150):
                        told = client.get_statistics()
                        assert told.used_blocks % 7 == 0, told
                        layout = client.get_layout()
                        assert (layout.num_blocks - layout.num_free) % 7 == 0
            except BaseException as error:
                errors.append(error)
            finally:
                is_over.set()

        thread = threading.Thread(target=ask)
        thread.start()
        held, step = [], 0
        while not is_over.is_set():
            step += 1
            if len(held) < 20 and step % 3:
                held.append(pool.get_new_blocks(7))
            elif held:
                pool.free_blocks(held.pop(0))
        thread.join()
        assert not errors, errors
        """,
        "here.sock",
    )
