"""The entry point: help, and what the user got wrong."""

import pytest
from cli.kv_pool_command import kv_pool_command
from replay.made_trace import record, write_trace

TRACE = [record(24, [1, 2, 3]), record(32, [1, 2, 4, 5])]


@pytest.fixture
def folder(tmp_path):
    write_trace(tmp_path / "trace.jsonl", TRACE)
    write_trace(tmp_path / "short.jsonl", [record(8, [1])])
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0" * 100)
    return tmp_path


def test_help_names_the_sub_commands(tmp_path):
    done = kv_pool_command("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("replay", "sweep", "serve", "stats", "defrag", "info"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("replay nowhere.jsonl --blocks 10", "nowhere.jsonl: no such file"),
        ("replay photo.jpg --blocks 10", "photo.jpg:1: JSON is malformed"),
        ("replay short.jsonl --blocks 10", "give --trace-block-size"),
        ("replay trace.jsonl --trace-block-size 8 --blocks 2", "the smallest request needs 3"),
        ("replay trace.jsonl --trace-block-size 8 --blocks 9 --clock wall", "unknown clock 'wall'"),
        ("replay trace.jsonl --trace-block-size 8 --memory much --model llama-3-8b", "'much' is not a size"),
        ("sweep trace.jsonl --trace-block-size 8 --blocks 2,9 --jobs 1", "the smallest request needs 3"),
    ],
)
def test_what_the_user_got_wrong_is_one_line_and_status_2(folder, arguments, message):
    done = kv_pool_command(*arguments.split(), cwd=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_nothing_but_the_message_is_on_stderr(folder):
    done = kv_pool_command("replay", "nowhere.jsonl", "--blocks", "10", cwd=folder)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


WRONG_OPTIONS = [
    ("replay trace.jsonl", "give the capacity either as --blocks or as --memory"),
    ("replay trace.jsonl --blocks 10 --memory 1GiB", "give the capacity either as --blocks or as --memory"),
    ("sweep trace.jsonl --blocks 10,many", "'10,many' is not a list of whole numbers"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_OPTIONS)
def test_options_that_can_not_be_meant_are_status_2_and_say_why(folder, arguments, message):
    done = kv_pool_command(*arguments.split(), cwd=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert not (folder / "sweep.png").exists()


def test_options_that_can_not_be_meant_are_one_line(folder):
    done = kv_pool_command("replay", "trace.jsonl", cwd=folder)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
