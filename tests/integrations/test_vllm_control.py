"""The control socket of a vLLM engine core's pool: answers and refusals, also while the engine steps."""

import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from events.peers.dynamo_indexer import find_free_port
from integrations.test_vllm_plugin import made_up_vllm, run  # noqa: F401, a fixture

from kv_pool import BlockPool, ControlError
from kv_pool.control import ControlClient
from kv_pool.integrations.vllm.pool_control import make_controlled

WORDS = {"block_size": 4, "kv_cache_group_id": 0}


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Return the path of the socket that a pool opens; it is gone with the pool."""
    monkeypatch.setenv("KV_POOL_VLLM_CONTROL", str(tmp_path / "here.sock"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield str(tmp_path / "here.sock")
    gc.collect()
    assert not list(tmp_path.rglob("*.sock"))


def make_pool(num_blocks=10, *, has_events=True):
    return make_controlled(BlockPool)(num_blocks, True, 4, has_events)


def test_answers_describe_the_pool_of_the_engine(path):
    pool = make_pool()
    blocks = pool.get_new_blocks(4)
    pool.reset_prefix_cache()
    pool.free_blocks(blocks[3:])
    assert pool.reset_prefix_cache() is False
    hold = pool.hold(blocks[:1], "leased to a connector")
    with ControlClient(path) as client:
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


def test_statistics_of_level_pool_have_the_hit_rate(path):
    """Hits, and prompt blocks that had to be computed, are what the pool sees of the look-ups."""
    pool = make_pool(has_events=False)
    request = SimpleNamespace(num_prompt_tokens=13, block_hashes=[b"1", b"2", b"3", b"4"])
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(request, blocks, num_cached_blocks=0, num_full_blocks=2, **WORDS)
    with ControlClient(path) as client:
        told = client.get_statistics()
        assert (told.hit_blocks, told.looked_up_blocks) == (0, 2)
        pool.cache_full_blocks(request, blocks, num_cached_blocks=2, num_full_blocks=4, **WORDS)
        pool.free_blocks(blocks)
        pool.touch([pool.null_block, *blocks[:2]])
        told = client.get_statistics()
        assert (told.hit_blocks, told.looked_up_blocks, told.pinned_blocks) == (2, 5, 0)


def test_commands_that_move_bytes_are_rejected_with_a_reason(path):
    pool = make_pool()
    with ControlClient(path) as client:
        for reason, call, *arguments in (
            ("blocks of vLLM cannot be moved", client.defragment),
            ("blocks of vLLM cannot be moved", client.migrate, 1, "b"),
            ("are in vLLM's scheduler, not in the pool", client.describe_sequences),
        ):
            with pytest.raises(ControlError, match=reason):
                call(*arguments)
        assert client.get_statistics().total_blocks == pool.num_gpu_blocks - 1


def test_socket_in_use_logs_a_warning_and_the_engine_continues(path, caplog):
    with caplog.at_level(logging.WARNING, "vllm.kv_pool"):
        first, second = make_pool(), make_pool(20)
    [message] = caplog.messages
    caplog.clear()  # the record has the error, which would keep the pools alive
    assert message.startswith("kv_pool could not open a control socket: ")
    assert f"is served at {path} already" in message
    assert message.endswith("With KV_POOL_VLLM_CONTROL=1 each engine process has its own")
    assert len(second.get_new_blocks(3)) == 3
    with ControlClient(path) as client:
        assert client.get_statistics().total_blocks == 9
    del first
    gc.collect()
    third = make_pool(30)
    with ControlClient(path) as client:
        assert client.get_statistics().total_blocks == third.num_gpu_blocks - 1


def test_socket_answers_while_the_engine_steps(path):
    pool = make_pool(200)
    is_over = threading.Event()
    errors = []

    def ask():
        try:
            with ControlClient(path) as client:
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


@pytest.mark.parametrize("control", ["1", "", "0"])
def test_setting_1_opens_the_default_socket_of_the_process(control, made_up_vllm, monkeypatch):  # noqa: F811
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made_up_vllm))
    code = f"""
        import os
        from kv_pool import ControlError
        from kv_pool.control import ControlClient
        from types import SimpleNamespace
        register()
        from vllm.v1.core.sched.scheduler import Scheduler
        model = SimpleNamespace(model_config=SimpleNamespace(served_model_name="a model"))
        pool = Scheduler(vllm_config=model).kv_cache_manager.block_pool
        if {control == "1"}:
            assert (pool.control.model_name, pool.control.engine) == ("a model", "0")
            with ControlClient(node=f"vllm-{{os.getpid()}}") as client, ControlClient() as other:
                assert client.get_statistics() == other.get_statistics()
            from prometheus_client import REGISTRY
            from vllm.v1.metrics import loggers
            for _ in range(2):  # one for each engine that this process starts
                loggers.PrometheusStatLogger(model, [0])
            labels = dict(model_name="a model", engine="0", pool="", state="free")
            assert REGISTRY.get_sample_value("kv_pool_blocks", labels) == 7
        else:
            assert not hasattr(pool, "control")
    """
    _, logged = run(made_up_vllm, code, VLLM_PLUGINS="kv_pool", KV_POOL_VLLM_CONTROL=control)
    assert len([text for _, text in logged if "kv-pool stats --socket" in text]) == (control == "1")
    assert not list(made_up_vllm.rglob("*.sock")), os.listdir(made_up_vllm)


@pytest.mark.parametrize(
    ("name", "given", "rank"), [("EngineCore", "{}", 0), ("EngineCore_DP3", "127.0.0.1:{}", 3)]
)
def test_each_rank_answers_at_a_port_of_its_own(path, monkeypatch, caplog, name, given, rank):
    first = find_free_port()
    monkeypatch.setenv("KV_POOL_VLLM_CONTROL_PORT", given.format(first))
    monkeypatch.setattr(multiprocessing.current_process(), "name", name)
    with caplog.at_level(logging.INFO, "vllm.kv_pool"):
        pool = make_pool()
    assert pool.control.block_pool is pool
    assert f"page, metrics: http://127.0.0.1:{first + rank}/" in caplog.text


STARTER = """
import multiprocessing, os, signal
from pathlib import Path
from kv_pool import BlockPool
from kv_pool.integrations.vllm.pool_control import make_controlled, remove_sockets_at_exit

def serve(ready):
    pool = make_controlled(BlockPool)(10, True, 4, False)
    ready.set()
    signal.pause()

remove_sockets_at_exit(os.environ["KV_POOL_VLLM_CONTROL"])
context = multiprocessing.get_context("fork")
ready = context.Event()
engine = context.Process(target=serve, args=(ready,))
engine.start()
ready.wait()
print(len(list(Path().rglob("*.sock"))))
engine.kill()
"""


@pytest.mark.parametrize("setting", ["1", "here.sock"])
def test_the_socket_of_a_killed_engine_is_gone_when_its_starter_ends(tmp_path, setting):
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "KV_POOL_VLLM_CONTROL": setting}
    command = [sys.executable, "-c", STARTER]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert not list(tmp_path.rglob("*.sock"))
