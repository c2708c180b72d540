"""`PartSchedule`: random operations for a `PartSide`.

Left out, because vLLM leaves a broken part behind:

- a block that is linked twice, or a new queue over linked blocks
- `popleft_n` of a negative count, or with fewer linked blocks than the counter says
- `pop` of an entry that is neither a block nor a dict: vLLM removes it, kv_pool keeps it
"""

import random

from core.part_operations import NUM_BLOCKS

KEYS = [f"{number:02x}0000000{group_id}" for number in range(3) for group_id in range(2)]


class PartSchedule:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.options = {"queued": self.some_names(range(NUM_BLOCKS))}

    def decide(self, side):
        """Yield operations, and receive the answer of `side` to each. Reads `side` but never changes it."""
        self.side = side
        steps = {
            self.take: 6,
            self.remove: 4,
            self.give: 10,
            self.walk: 6,
            self.list_free_blocks: 1,
            self.ask_too_much: 1,
            self.cut_a_link: 1,
            self.lie_about_the_count: 1,
            self.make_queue: 1,
            self.use_map: 12,
            self.use_foreign_entry: 1,
            self.copy_map: 1,
            self.make_block: 2,
            self.use_block: 8,
        }
        while True:
            (step,) = self.rng.choices(list(steps), list(steps.values()))
            yield from step()

    def some_names(self, names):
        names = list(names)
        return self.rng.sample(names, self.rng.randrange(len(names) + 1))

    def linked(self):
        return [block.block_id for block in self.side.queue.iter_blocks_after(None)]

    def unlinked(self):
        return sorted(set(range(NUM_BLOCKS)) - set(self.linked()))

    # ---- the free queue ----------------------------------------------------------------------------

    def take(self):
        if self.rng.random() < 0.5:
            yield ["popleft"]
        else:
            yield ["popleft_n", self.rng.randrange(len(self.linked()) + 1)]

    def remove(self):
        yield ["remove", self.rng.randrange(NUM_BLOCKS)]

    def give(self):
        rng = self.rng
        names = self.some_names(self.unlinked())
        if len(names) == 1 or (names and rng.random() < 0.3):
            yield ["append", names[0]]
        else:
            yield [rng.choice(["append_n", "prepend_n"]), names]

    def walk(self):
        rng = self.rng
        if rng.random() < 0.4:
            yield ["iter_blocks_after", rng.choice([None, rng.randrange(NUM_BLOCKS)])]
        yield ["walk_on", rng.randrange(4)]

    def list_free_blocks(self):
        yield ["get_all_free_blocks"]

    def ask_too_much(self):
        yield ["popleft_n", self.side.queue.num_free_blocks + self.rng.randrange(1, 3)]

    def cut_a_link(self):
        rng = self.rng
        place = rng.choice(["head", "tail", "first"])
        if place == "first" and not self.linked():
            return
        unlinked = self.unlinked()
        num_free = self.side.queue.num_free_blocks
        yield ["cut_link", place]
        if place == "first":
            yield ["popleft"]
        elif place == "head":
            yield ["popleft"]
            yield ["get_all_free_blocks"]
            yield ["prepend_n", unlinked]
            yield ["prepend_n", []]
            yield ["iter_blocks_after", None]
            yield ["walk_on", 2]
            yield ["popleft_n", num_free + 1]
        else:
            if unlinked:
                yield ["append", unlinked[0]]
            yield ["append_n", unlinked]
            yield ["append_n", []]
        yield ["mend_link", place]

    def lie_about_the_count(self):
        num_free = self.side.queue.num_free_blocks
        yield ["set_num_free_blocks", 0]
        yield ["popleft_n", 1]
        yield ["popleft_n", 0]
        if num_free == 0:
            yield ["set_num_free_blocks", 2]
            yield ["popleft"]
        yield ["set_num_free_blocks", num_free]

    def make_queue(self):
        yield ["popleft_n", len(self.linked())]
        yield ["make_queue", self.some_names(range(NUM_BLOCKS))]

    # ---- the prefix map ----------------------------------------------------------------------------

    def use_map(self):
        rng = self.rng
        key, name = rng.choice(KEYS), rng.randrange(NUM_BLOCKS)
        calls = [
            ["insert", key, name],
            ["insert", key, name],
            ["pop", key, name],
            ["pop", key, name],
            ["get_one_block", key],
            ["contain", key, name],
            ["count_keys"],
        ]
        found = self.side.map.get_one_block(bytes.fromhex(key))
        if found is not None:
            calls += [["pop", key, found.block_id], ["contain", key, found.block_id]]
        yield rng.choice(calls)

    def use_foreign_entry(self):
        key = "ff00000000"
        yield ["put_foreign_entry", key]
        yield ["get_one_block", key]
        yield ["contain", key, 1]
        yield ["insert", key, 1]
        yield ["drop_entry", key]

    def copy_map(self):
        yield ["copy_and_clear"]
        yield from self.use_map()
        yield ["put_copy_back"]
        if self.rng.random() < 0.5:
            yield ["copy_and_clear"]

    # ---- a block -----------------------------------------------------------------------------------

    def make_block(self):
        rng = self.rng
        fields = {
            "ref_cnt": rng.randrange(3),
            "_block_hash": rng.choice([None, *KEYS]),
            "_block_hash_num_tokens": rng.choice([None, 4]),
            "prev_free_block": rng.randrange(NUM_BLOCKS),
            "next_free_block": rng.randrange(NUM_BLOCKS),
            "is_null": rng.random() < 0.3,
        }
        yield ["make_block", rng.randrange(200), {name: fields[name] for name in self.some_names(fields)}]

    def use_block(self):
        rng = self.rng
        yield rng.choice(
            [
                ["set_block_hash", rng.choice(KEYS), rng.choice([None, 4, 8])],
                ["reset_hash"],
                ["repr_block", "scratch"],
                ["repr_block", rng.randrange(NUM_BLOCKS)],
                ["write", "ref_cnt", rng.randrange(4)],
                ["write", "is_null", rng.random() < 0.5],
                ["write", "_block_hash_num_tokens", rng.choice([None, 12])],
                ["write", rng.choice(["block_hash", "block_hash_num_tokens", "unheard_of"]), None],
            ]
        )
