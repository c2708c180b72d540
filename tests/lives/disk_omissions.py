"""Planted omissions of a disk: forgotten blocks that return, and blocks that are lost, after a restart."""

from lives.omissions import Omission

DISK = "kv_pool.tiers.disk_tier"
FILES = "kv_pool.tiers.disk_files"


def wipe_nothing(original):
    def wipe(disk, slot, key):
        disk._unwiped.pop(slot, None)

    return wipe


def wipe_no_file(original):
    return lambda files: None


def write_no_header(original):
    """The block is only in the process's index."""

    def write(files, slot, *args):
        original(files, slot, *args)
        files.wipe(slot)

    return write


DISK_OMISSIONS = [
    Omission("a disk forgets nothing", "manager", DISK, "DiskTier._wipe", wipe_nothing),
    Omission("a disk that is cleared keeps its files", "adapter", FILES, "SlotFiles.wipe_all", wipe_no_file),
    Omission("a disk writes no header", "manager", FILES, "SlotFiles.write", write_no_header),
]
