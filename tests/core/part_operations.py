"""`PartSide`: a free queue, a prefix map and a block, tested separately, driven by operations.

The queue and the map use eight bare blocks, named by their ids. `make_block` replaces a ninth, "scratch".
Keys are hex.
"""

from itertools import islice
from typing import ClassVar

from core.plain_operations import Side, hex_of

NUM_BLOCKS = 8


class PartSide(Side):
    # Only errors that vLLM raises before it changes anything.
    EXPECTED_ERRORS: ClassVar = {
        "popleft": (ValueError, AssertionError, RuntimeError),
        "popleft_n": AssertionError,
        "remove": RuntimeError,
        "append": RuntimeError,
        "append_n": AssertionError,
        "prepend_n": AssertionError,
        "get_all_free_blocks": RuntimeError,
        "get_one_block": AssertionError,
        "contain": AssertionError,
        "insert": AssertionError,
        "set_block_hash": AssertionError,
        "write": AttributeError,
    }

    def __init__(self, classes, options):
        super().__init__(classes)
        self.blocks = [classes.KVCacheBlock(block_id) for block_id in range(NUM_BLOCKS)]
        self.scratch = classes.KVCacheBlock(100)
        self.queue = classes.FreeKVCacheBlockQueue(self.find(options["queued"]))
        self.map = classes.BlockHashToBlockMap()
        self.walk = iter(())
        self.cut = {}  # links that an operation took away
        self.copied = {}

    def find(self, names):
        return [self.blocks[name] for name in names]

    def name(self, block):
        if block is self.queue.fake_free_list_head:
            return "head"
        if block is self.queue.fake_free_list_tail:
            return "tail"
        return None if block is None else block.block_id

    # ---- the free queue ----------------------------------------------------------------------------

    def make_queue(self, names):
        """Make a queue over blocks that are in no queue."""
        self.walk = iter(())
        self.queue = self.classes.FreeKVCacheBlockQueue(self.find(names))

    def popleft(self):
        return self.name(self.queue.popleft())

    def popleft_n(self, num_blocks):
        return [self.name(block) for block in self.queue.popleft_n(num_blocks)]

    def remove(self, name):
        self.queue.remove(self.blocks[name])

    def append(self, name):
        self.queue.append(self.blocks[name])

    def append_n(self, names):
        self.queue.append_n(self.find(names))

    def prepend_n(self, names):
        self.queue.prepend_n(self.find(names))

    def get_all_free_blocks(self):
        return [self.name(block) for block in self.queue.get_all_free_blocks()]

    def iter_blocks_after(self, cursor):
        self.walk = self.queue.iter_blocks_after(None if cursor is None else self.blocks[cursor])

    def walk_on(self, num_steps):
        """Continue the latest iteration. It reads links as it goes, so it shows later changes."""
        return [self.name(block) for block in islice(self.walk, num_steps)]

    def set_num_free_blocks(self, num_blocks):
        self.queue.num_free_blocks = num_blocks

    def cut_link(self, place):
        """Set one link of a sentinel, or of the first block, to None."""
        owner, field = self.ends()[place]
        self.cut[place] = getattr(owner, field)
        setattr(owner, field, None)

    def mend_link(self, place):
        owner, field = self.ends()[place]
        setattr(owner, field, self.cut.pop(place))

    def ends(self):
        head, tail = self.queue.fake_free_list_head, self.queue.fake_free_list_tail
        ends = {"head": (head, "next_free_block"), "tail": (tail, "prev_free_block")}
        if head.next_free_block is not None:
            ends["first"] = (head.next_free_block, "next_free_block")
        return ends

    # ---- the prefix map ----------------------------------------------------------------------------

    def insert(self, key, name):
        self.map.insert(bytes.fromhex(key), self.blocks[name])

    def pop(self, key, block_id):
        return self.name(self.map.pop(bytes.fromhex(key), block_id))

    def get_one_block(self, key):
        return self.name(self.map.get_one_block(bytes.fromhex(key)))

    def contain(self, key, block_id):
        return self.map.contain(bytes.fromhex(key), block_id)

    def count_keys(self):
        return [len(self.map), bool(self.map)]

    def put_foreign_entry(self, key):
        self.map._cache[bytes.fromhex(key)] = "neither block nor dict"

    def drop_entry(self, key):
        self.map._cache.pop(bytes.fromhex(key), None)

    def copy_and_clear(self):
        self.copied = self.map._cache.copy()
        self.map._cache.clear()

    def put_copy_back(self):
        self.map._cache.update(self.copied)

    # ---- a block -----------------------------------------------------------------------------------

    def make_block(self, block_id, fields):
        """Make the scratch block from `fields`; a link is given as a block id, a hash as hex."""
        made = dict(fields)
        if made.get("_block_hash") is not None:
            made["_block_hash"] = bytes.fromhex(made["_block_hash"])
        for link in ("prev_free_block", "next_free_block"):
            if link in made:
                made[link] = self.blocks[made[link]]
        self.scratch = self.classes.KVCacheBlock(block_id, **made)

    def set_block_hash(self, key, num_tokens):
        self.scratch.set_block_hash(bytes.fromhex(key), *[] if num_tokens is None else [num_tokens])

    def reset_hash(self):
        self.scratch.reset_hash()

    def repr_block(self, name):
        return repr(self.scratch if name == "scratch" else self.blocks[name])

    def write(self, field, value):
        setattr(self.scratch, field, value)

    # ---- everything observable ---------------------------------------------------------------------

    def picture(self):
        queue, scratch = self.queue, self.scratch
        return {
            "num_free_blocks": queue.num_free_blocks,
            "head": self.name(queue.fake_free_list_head.next_free_block),
            "tail": self.name(queue.fake_free_list_tail.prev_free_block),
            "links": [
                [self.name(block.prev_free_block), self.name(block.next_free_block)] for block in self.blocks
            ],
            "map": {
                key.hex(): {"copies": [[block_id, self.name(block)] for block_id, block in entry.items()]}
                if isinstance(entry, dict)
                else entry
                if isinstance(entry, str)
                else self.name(entry)
                for key, entry in self.map._cache.items()
            },
            "scratch": [
                scratch.block_id,
                scratch.ref_cnt,
                hex_of(scratch.block_hash),
                scratch.block_hash_num_tokens,
                hex_of(scratch._block_hash),
                scratch._block_hash_num_tokens,
                self.name(scratch.prev_free_block),
                self.name(scratch.next_free_block),
                scratch.is_null,
                scratch.pool is None,
                bool(scratch),
            ],
        }
