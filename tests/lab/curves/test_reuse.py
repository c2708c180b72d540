"""Prompts from which no curve can be computed are refused."""

import threading

import pytest
from lab.curves.made_reuse import read_reuse
from lab.made_trace import record, write_trace

from kv_pool import TraceError
from kv_pool.lab.curves import reuse
from kv_pool.lab.settings import ReplaySettings

SIZE = 8


def settings_for(tmp_path, records, **more):
    path = write_trace(tmp_path / "trace.jsonl", records)
    return ReplaySettings(str(path), 1, trace_block_size=SIZE, convention="full_blocks", **more)


@pytest.mark.parametrize(
    "prompts",
    [[[1, 2, 3], [4, 2, 3]], [[1, 2, 3], [1, 3]], [[1, 1]], [[1, 2], [2, 5]], [[1, 2, 3], [7, 8], [7, 1]]],
    ids=["other parent", "other position", "twice in a prompt", "middle as head", "head in a new tail"],
)
@pytest.mark.parametrize("block_size", [None, 4], ids=["ids", "hashes"])
def test_ids_that_name_no_prefix_are_refused(tmp_path, prompts, block_size):
    records = [record(SIZE * len(ids), ids) for ids in prompts]
    with pytest.raises(TraceError, match="kv-pool sweep replays such a trace"):
        read_reuse(settings_for(tmp_path, records, block_size=block_size))


def test_signals_do_not_wait_for_the_count_of_blocks(tmp_path, monkeypatch):
    """Regression: Ctrl-C waited 17 s for the end of one call of NumPy in the main thread."""
    callers = []
    count = reuse._count_distinct

    def note_thread(*arguments):
        callers.append(threading.current_thread())
        return count(*arguments)

    monkeypatch.setattr(reuse, "_count_distinct", note_thread)
    assert read_reuse(settings_for(tmp_path, [record(SIZE * 2, [1, 2])])).num_distinct == 2
    [caller] = callers
    assert caller is not threading.main_thread()
    caller.join(5)
    assert not caller.is_alive(), "it used to wait ten seconds for other work"
