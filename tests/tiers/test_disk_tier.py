"""Tests of `DiskTier`: blocks survive restarts, and damaged blocks are never returned."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from damage import damage
from tiers.crash_states import WriteLog
from tiers.made_tiers import BLOCK_BYTES, Device, Inverted, failing_writes, make_key

from kv_pool import InvalidArgumentError, KVPoolError
from kv_pool.errors import LayoutMismatchError, TierError
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.tiers import invariants
from kv_pool.tiers.disk_files import HEADER_BYTES
from kv_pool.tiers.disk_tier import DiskTier, Prefetcher

KEYS = [make_key(number) for number in range(16)]
TESTS = Path(__file__).parent.parent


def make_device():
    device = Device()
    for block_id, key in enumerate(KEYS):
        device.write(block_id, key)
    return device


@pytest.fixture
def device():
    return make_device()


@pytest.fixture
def tier(tmp_path, device):
    """A tier in `tmp_path` for 8 blocks, with the blocks 0, 1 and 2."""
    tier = DiskTier(tmp_path, 8, device.layout)
    put(tier, device, 0, 1, 2)
    yield tier
    tier.close()


def put(tier, device, *numbers):
    tier.put([KEYS[number] for number in numbers], device.storage, numbers)


def reopen(tier, device, capacity=8, **options):
    tier.close()
    return DiskTier(tier._files.path, capacity, device.layout, **options)


def check_bytes(tier, device):
    """Verify that every block of the tier can be read and matches its key."""
    read = tier.read(tier.list_keys())
    assert not read.failed
    other = Device(len(read.keys) + 1)
    read.storage.copy_to(other.storage, list(zip(read.block_ids, range(len(read.keys)), strict=True)))
    assert all(other.holds(place, key) for place, key in enumerate(read.keys))


def test_restart_restores_blocks_and_lru_order(tmp_path, device):
    tier = DiskTier(tmp_path, 8, device.layout)
    put(tier, device, 0, 1, 2, 3)
    tier.touch([KEYS[1]])
    tier.remove([KEYS[2]])
    tier = reopen(tier, device)
    assert tier.reopened == (3, 0)
    assert tier.list_keys() == [KEYS[0], KEYS[3], KEYS[1]]
    check_bytes(tier, device)
    put(tier, device, 4, 5, 6, 7, 8)
    check_bytes(tier, device)
    invariants.check_tier(tier)


@pytest.mark.parametrize("verifies", [True, False])
def test_flipped_bytes_are_detected_on_open_or_read(tmp_path, device, tier, verifies):
    slot = tier._slot_of[KEYS[1]]
    tier.close()
    with open(tmp_path / "blocks", "r+b") as file:
        file.seek(slot * 4096 + BLOCK_BYTES - 1)
        last = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last[0] ^ 1]))
    tier = DiskTier(tmp_path, 8, device.layout, verifies=verifies)
    assert tier.reopened == ((2, 1) if verifies else (3, 0))
    if not verifies:
        read = tier.read(KEYS[:3])
        assert (read.keys, read.failed) == ([KEYS[0], KEYS[2]], [KEYS[1]])
        assert tier.get_statistics().num_read_errors == 1
    assert KEYS[1] not in tier
    check_bytes(tier, device)
    invariants.check_tier(tier)


@pytest.mark.parametrize("name", ["blocks", "headers"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_truncated_file_keeps_blocks_before_the_cut(tmp_path, device, name, share):
    tier = DiskTier(tmp_path, 8, device.layout)
    put(tier, device, 0, 1, 2, 3, 4)
    tier.close()
    size = os.path.getsize(tmp_path / name)
    os.truncate(tmp_path / name, int(size * share))
    tier = DiskTier(tmp_path, 8, device.layout)
    assert 0 <= tier.reopened.num_blocks <= 4 + (name == "blocks")
    assert name == "headers" or tier.reopened.num_blocks + tier.reopened.num_dropped == 5
    assert tier.list_keys() == KEYS[: tier.reopened.num_blocks]
    check_bytes(tier, device)
    invariants.check_tier(tier)


def test_truncating_an_open_file_loses_only_its_blocks(tmp_path, device, tier):
    os.truncate(tmp_path / "blocks", 4096 + 10)
    read = tier.read(KEYS[:3])
    assert (list(read.keys), list(read.failed)) == ([KEYS[0]], [KEYS[1], KEYS[2]])
    put(tier, device, 3)
    check_bytes(tier, device)


def test_forgotten_blocks_stay_away_after_a_restart(tmp_path, device, tier):
    tier.forget([KEYS[1]])
    tier = reopen(tier, device)
    assert tier.list_keys() == [KEYS[0], KEYS[2]]
    tier.clear()
    tier = reopen(tier, device)
    assert tier.reopened == (0, 0)


def test_smaller_capacity_keeps_the_blocks_that_fit(tmp_path, device):
    tier = DiskTier(tmp_path, 8, device.layout)
    put(tier, device, *range(8))
    tier = reopen(tier, device, 3)
    assert (tier.reopened, len(tier)) == ((3, 0), 3)
    assert os.path.getsize(tmp_path / "headers") == 3 * HEADER_BYTES
    check_bytes(tier, device)
    tier = reopen(tier, device, 20)
    assert len(tier) == 3


def test_folder_of_another_layout_is_refused_unchanged(tmp_path, device, tier):
    tier.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = BlockLayout("float16 [3]", BLOCK_BYTES, 4, "sha256", "00")
    with pytest.raises(LayoutMismatchError, match=r"block_format is 'float16 \[3\]' here and 'uint8"):
        DiskTier(tmp_path, 8, other)
    with pytest.raises(LayoutMismatchError, match="format is 'inverted' here and 'raw' there"):
        DiskTier(tmp_path, 8, device.layout, Inverted())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len(DiskTier(tmp_path, 8, device.layout)) == 3


def test_folder_of_another_model_is_refused(tmp_path, device):
    def describe(model, weights):
        return BlockLayout.describe(device.storage, 4, model=model, weights=weights)

    DiskTier(tmp_path, 8, describe("one", "r1")).close()
    for model, weights, message in (
        ("other", "r1", "model is 'other' here and 'one' there"),
        ("one", "r2", "weights is 'r2' here and 'r1' there"),
        ("", "", "model is '' here and 'one' there"),
    ):
        with pytest.raises(LayoutMismatchError, match=message):
            DiskTier(tmp_path, 8, describe(model, weights))


def test_version_1_folder_has_no_model(tmp_path, device):
    tier = DiskTier(tmp_path, 8, device.layout)
    put(tier, device, 0)
    tier.close()
    told = json.loads((tmp_path / "tier.json").read_text())
    told["version"] = 1
    del told["layout"]["model"], told["layout"]["weights"]
    (tmp_path / "tier.json").write_text(json.dumps(told))
    with pytest.raises(LayoutMismatchError, match="model is 'one' here and '' there"):
        DiskTier(tmp_path, 8, BlockLayout.describe(device.storage, 4, model="one"))
    tier = DiskTier(tmp_path, 8, device.layout)
    assert tier.list_keys() == [KEYS[0]]
    tier.close()
    (tmp_path / "tier.json").write_text(json.dumps({**told, "version": 9}))
    with pytest.raises(LayoutMismatchError, match="format version 9; supported versions are 1, 2"):
        DiskTier(tmp_path, 8, device.layout)


def test_folder_with_foreign_files_is_refused(tmp_path, device):
    (tmp_path / "letters").write_text("dear")
    with pytest.raises(TierError, match=r"not a tier's folder: it has no tier\.json, but letters"):
        DiskTier(tmp_path, 8, device.layout)
    assert [path.name for path in tmp_path.iterdir()] == ["letters"]


def run_in_child(function, folder):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        f"from tiers.test_disk_tier import {function.__name__} as run\nrun(sys.argv[2])"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(TESTS), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def try_to_open(folder):
    """Open a folder; print the error. Runs in a child."""
    try:
        DiskTier(folder, 8, Device().layout)
    except TierError as error:
        print(error)


def test_folder_in_use_is_refused(tmp_path, device, tier):
    with pytest.raises(TierError, match="in use by another tier"):
        DiskTier(tmp_path, 8, device.layout)
    output, errors = run_in_child(try_to_open, tmp_path).communicate()
    assert "in use by another tier" in output, errors
    tier.close()
    DiskTier(tmp_path, 8, device.layout).close()


def test_folder_that_cannot_be_created_raises(tmp_path, device):
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="cannot be used as a tier"):
        DiskTier(tmp_path / "file" / "tier", 8, device.layout)


def try_without_privileges(folder):
    if os.getuid() == 0:
        os.chown(folder, 65534, -1)
        os.setuid(65534)
    try_to_open(folder)


def test_folder_without_permission_raises():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        output, errors = run_in_child(try_without_privileges, folder).communicate()
    assert "Permission denied" in output, errors


def test_too_long_key_is_refused(tmp_path, device):
    tier = DiskTier(tmp_path, 8, device.layout)
    with pytest.raises(InvalidArgumentError, match="a key has 100 bytes"):
        tier.put([bytes(100)], device.storage, [0])
    assert len(tier) == 0


def write_beyond_the_limit(folder):
    """Put five blocks with files limited to two and a half blocks; print the results. Runs in a child."""
    device = make_device()
    tier = DiskTier(folder, 8, device.layout)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 4096 + BLOCK_BYTES // 2,) * 2)
    stored = tier.put(KEYS[:5], device.storage, range(5))
    intact = all(device.holds(block_id, key) for block_id, key in enumerate(KEYS))
    again = tier.put(KEYS[5:6], device.storage, [5])
    tier.remove(KEYS[:1])
    in_place = tier.put(KEYS[6:7], device.storage, [6])
    check_bytes(tier, device)
    invariants.check_tier(tier)
    told = tier.get_statistics()
    print(json.dumps([len(stored), intact, len(again), len(in_place), told.num_write_errors]))
    tier.close()


def test_full_disk_counts_write_errors_and_keeps_the_rest(tmp_path, device):
    child = run_in_child(write_beyond_the_limit, tmp_path)
    output, errors = child.communicate()
    assert child.returncode == 0, errors
    assert json.loads(output) == [2, True, 0, 1, 4]
    assert os.strerror(errno.EFBIG) in errors  # logged once
    assert errors.count("could not be written") == 1
    tier = DiskTier(tmp_path, 8, device.layout)
    assert tier.reopened == (2, 0)
    check_bytes(tier, device)


def write_for_ever(folder):
    """Put and remove blocks until killed; print a line after the first put. Runs in a child."""
    rng = np.random.default_rng()
    device = Device(64)
    tier = DiskTier(folder, 40, device.layout)
    has_told = False
    while True:
        keys = [make_key(int(number)) for number in rng.choice(200, 8, replace=False)]
        new = tier.touch(keys)
        tier.remove(tier.list_next_evicted(len(tier) + len(new) - 40))
        for block_id, key in enumerate(new):
            device.write(block_id, key)
        tier.put(new, device.storage, range(len(new)))
        if rng.random() < 0.02:
            tier.forget(keys[:2])
        if len(tier) == 40 and not has_told:
            has_told = True
            print("full", flush=True)


@pytest.mark.parametrize("seed", range(3))
def test_killed_process_leaves_only_valid_blocks(tmp_path, device, seed):
    rng = np.random.default_rng(seed)
    for _ in range(4):
        child = run_in_child(write_for_ever, tmp_path)
        assert child.stdout.readline() == "full\n"
        # Kill it at an arbitrary point: after an amount of work of our own.
        sum(range(int(rng.integers(0, 400_000))))
        child.send_signal(signal.SIGKILL)
        child.communicate()
        tier = DiskTier(tmp_path, 40, device.layout)
        assert tier.reopened.num_blocks >= 31  # a step removes at most 8 before it puts others
        assert tier.reopened.num_dropped == 0
        check_bytes(tier, device)
        invariants.check_tier(tier)
        tier.close()


# ---- failing disks -----------------------------------------------------------------------------------


def list_found(tmp_path, device):
    """Return the keys that a new process would find in the folder now."""
    copy = tmp_path.with_name("copy")
    shutil.copytree(tmp_path, copy)
    with closing(DiskTier(copy, 8, device.layout)) as tier:
        found = tier.list_keys()
    shutil.rmtree(copy)
    return found


def test_forget_raises_if_the_disk_fails(tmp_path, device, tier):
    with failing_writes(tier), pytest.raises(TierError, match="may be found after a restart: Input/output"):
        tier.forget([KEYS[1]])
    assert tier.list_keys() == [KEYS[0], KEYS[2]]
    assert KEYS[1] in list_found(tmp_path, device)
    tier.forget([])  # wipes it now
    assert KEYS[1] not in list_found(tmp_path, device)


def test_forget_raises_for_keys_that_an_earlier_wipe_left(tmp_path, device, tier):
    with failing_writes(tier):
        assert tier.remove([KEYS[1]]) == [KEYS[1]]
        with pytest.raises(TierError, match="could not be wiped"):
            tier.forget([KEYS[1]])
    assert tier.get_statistics().num_write_errors == 1
    assert tier.forget([KEYS[1]]) == []
    assert list_found(tmp_path, device) == [KEYS[0], KEYS[2]]


def test_close_retries_failed_wipes(tmp_path, device, tier):
    with failing_writes(tier):
        tier.remove([KEYS[1]])
    tier = reopen(tier, device)
    assert tier.list_keys() == [KEYS[0], KEYS[2]]


def test_slot_with_failed_wipe_can_be_reused(tmp_path, device, tier):
    with failing_writes(tier):
        tier.remove([KEYS[1]])
    put(tier, device, 3)
    assert tier.forget([KEYS[1]]) == []
    assert sorted(list_found(tmp_path, device)) == sorted([KEYS[0], KEYS[2], KEYS[3]])
    check_bytes(tier, device)


def test_clear_raises_if_the_disk_fails(tmp_path, device, tier):
    with failing_writes(tier), pytest.raises(TierError, match=r"its blocks in .* could not be wiped"):
        tier.clear()
    assert tier.list_keys() == []
    put(tier, device, 3)
    tier.forget([])
    assert list_found(tmp_path, device) == [KEYS[3]]


def test_failed_sync_rewrites_all_headers(tmp_path, device, tier):
    """The operating system marks unwritten pages as clean, so another fsync alone does nothing."""
    tier.remove([KEYS[1]])
    with failing_writes(tier), pytest.raises(TierError):
        tier.forget([KEYS[1]])
    log = WriteLog(tmp_path)
    with log.record():
        tier.forget([KEYS[1]])
        assert log.durable["headers"] == (tmp_path / "headers").read_bytes()
        tier.forget([KEYS[1]])
    assert log.waiting["headers"] == []


# ---- folders changed by others -----------------------------------------------------------------------


def spoil_with_pipe(path):
    path.unlink()
    os.mkfifo(path, 0o600)


def spoil_owner(path):
    if os.getuid():
        pytest.skip("only root gives files away")
    os.chown(path, 65534, -1)


@pytest.mark.parametrize("name", ["tier.json", "lock", "headers", "blocks"])
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))), "it is a symbolic link"),
        (lambda path: os.link(path, path.with_name("another name")), "2 hard links"),
        (spoil_with_pipe, "not a regular file"),
        (lambda path: path.chmod(0o640), "other users can access it .mode 640."),
        (spoil_owner, "it belongs to user 65534"),
    ],
)
def test_file_accessible_to_others_is_refused(tmp_path, device, name, spoil, why):
    folder = tmp_path / "tier"
    tier = DiskTier(folder, 8, device.layout)
    put(tier, device, 0)
    tier.close()
    spoil(folder / name)
    with pytest.raises(TierError, match=f"cannot be used as a tier: .*{why}"):
        DiskTier(folder, 8, device.layout)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])
def test_folder_writable_by_others_is_refused(tmp_path, device, mode):
    folder = tmp_path / "tier"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(TierError, match=f"other users can write to it .mode {mode:o}.; chmod 700"):
        DiskTier(folder, 8, device.layout)
    assert list(folder.iterdir()) == []


def test_folder_behind_a_symbolic_link_is_refused(tmp_path, device):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(TierError, match="symbolic link; name the folder it points to"):
        DiskTier(tmp_path / "link", 8, device.layout)


def test_folder_of_another_user_is_refused(tmp_path, device):
    (tmp_path / "tier").mkdir(mode=0o700)
    spoil_owner(tmp_path / "tier")
    with pytest.raises(TierError, match="it belongs to user 65534, not to 0"):
        DiskTier(tmp_path / "tier", 8, device.layout)


def test_new_folder_is_private(tmp_path, device):
    before = os.umask(0)
    try:
        DiskTier(tmp_path / "some" / "tier", 8, device.layout).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "some" / "tier").stat().st_mode) == 0o700


def make_on_a_full_disk(folder):
    """Open a new folder with files limited to ten bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try_to_open(folder)


def test_folder_left_by_a_full_disk_can_be_created(tmp_path, device):
    """A partial description stayed behind, and every later start refused the folder."""
    folder = tmp_path / "tier"
    output, errors = run_in_child(make_on_a_full_disk, folder).communicate(timeout=60)
    assert os.strerror(errno.EFBIG) in output, errors
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "tier.json.new"]
    tier = DiskTier(folder, 8, device.layout)
    put(tier, device, 0)
    check_bytes(tier, device)
    tier.close()


def test_blocks_written_before_an_interruption_have_their_slots(tier, device, monkeypatch):
    write = tier._files.write
    slots = []

    def interrupt_second(slot, *block):
        slots.append(slot)
        if len(slots) == 2:
            raise KeyboardInterrupt
        write(slot, *block)

    monkeypatch.setattr(tier._files, "write", interrupt_second)
    with pytest.raises(KeyboardInterrupt):
        put(tier, device, 3, 4, 5)
    put(tier, device, 6)
    assert tier.list_keys() == [KEYS[number] for number in (0, 1, 2, 3, 6)]
    invariants.check_tier(tier)


def test_prefetch_leaves_out_blocks_that_left_their_slots(tier, device):
    """Neither is their old content taken, nor is a block dropped that was damaged in its old slot."""
    put(tier, device, 3)
    os.pwrite(tier._files._blocks, b"damaged", 4096)
    with closing(Prefetcher(tier, 8)) as prefetcher:
        prefetcher.ask("r", KEYS[:4])
        assert prefetcher.wait(60)
        tier.remove([KEYS[2], KEYS[1], KEYS[0]])
        put(tier, device, 1, 2)
        ((_, read),) = prefetcher.take_done()
    assert (read.keys, read.failed) == ([KEYS[3]], [])
    read.storage.copy_to(device.storage, [(read.block_ids[0], 15)])
    assert device.holds(15, KEYS[3])
    assert tier.list_keys() == [KEYS[3], KEYS[1], KEYS[2]]
    counts = tier.get_statistics()
    assert (counts.num_read, counts.num_read_errors) == (1, 0)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b'{"version": "\\ud800"}'])
def test_malformed_description_is_refused(tmp_path, device, content):
    DiskTier(tmp_path, 8, device.layout).close()
    (tmp_path / "tier.json").write_bytes(content)
    with pytest.raises(TierError, match="does not describe a tier"):
        DiskTier(tmp_path, 8, device.layout)


@pytest.mark.parametrize("seed", range(40))
def test_damaged_folder_is_refused_or_has_only_valid_blocks(tmp_path, device, seed):
    rng = random.Random(seed)
    folder = tmp_path / "tier"
    tier = DiskTier(folder, 8, device.layout)
    put(tier, device, *range(6))
    tier.close()
    for _ in range(4):
        name = rng.choice(["headers", "headers", "blocks", "tier.json"])
        (folder / name).write_bytes(damage(rng, (folder / name).read_bytes()))
        try:
            tier = DiskTier(folder, 8, device.layout, verifies=rng.random() < 0.5)
        except KVPoolError:
            return
        read = tier.read(tier.list_keys())
        for key, block_id in zip(read.keys, read.block_ids, strict=True):
            assert read.storage.read_block(block_id) == device.storage.read_block(KEYS.index(key))
        invariants.check_tier(tier)
        tier.close()
