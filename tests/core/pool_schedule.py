"""`PoolSchedule`: random operations for a `PoolSide`, as a scheduler and vLLM's connectors would mix them.

Left out, because vLLM leaves a broken pool behind or does not define the result:

- negative counts and ids: they raise the free count, or hit the last block
- a second free of one of the pool's blocks: its count goes to -1
- an error in the middle of a list (`touch`, `unpin_blocks`, `cache_full_blocks`): the first part is done
- another pool's blocks in other lists than the one to free: they join the wrong queue
- caching a free block, or the null block through `_insert_block_hash` and `move_block_hashes`: refused here
- more blocks to cache than the request has hashes for: IndexError there, refused beforehand here
- `unpin_blocks` of bare blocks: vLLM's reset fails for the ids it does not know
- a freed bare block that reaches 0 references: it would join the queue beside the pool's own
- secondary keys of a bare block with an id of the pool: in vLLM, the pool's block with that id drops them
- watchers that raise, and `take_events` of a pool whose events go elsewhere
- counts that are not integers: AssertionError there, TypeError from a compiled core
- prompt embeddings: kv_pool's requests have none
- until vLLM 0.32, references of the null block: counted there, and used by nothing
"""

import random
from dataclasses import dataclass

from core.plain_operations import has_raised

MAX_REQUESTS = 8
BARE = ("bare-0", "bare-1", "bare-2")


@dataclass
class Sequence:
    """A request in one group: its block table, by name, and how much of it is in the prefix map."""

    number: int
    group_id: int
    stride: int
    table: list
    num_cached: int


class PoolSchedule:
    """Operations on pools of one release of vLLM, given as (0, 33) for 0.33."""

    def __init__(self, seed, release=(0, 33)):
        self.rng = rng = random.Random(seed)
        self.unit = rng.choice([1, 2, 4])
        self.strides = rng.choice([[1], [1, 1], [1, 2], [2, 3], [1, 3, 1]])  # block size / unit, by group
        self.options = {
            "num_blocks": 1 if rng.random() < 0.03 else rng.randrange(2, 34),
            "num_host_blocks": rng.randrange(2, 9),
            "caching": rng.random() < 0.88,
            "hash_block_size": self.unit,
            "events": rng.random() < 0.7,
            "shares_events": rng.random() < 0.3,
            "num_lookahead": rng.choice([0, 0, 0, 1, 3]),
            "medium": rng.choice(["GPU", "GPU", "CPU", "STORAGE"]),
            "observer": rng.choice([None, "recorder", "recorder", "collector"]),
        }
        if release < (0, 33):
            self.options |= {"num_lookahead": 0, "counts_null_references": True}
        self.edits_map = rng.random() < 0.25
        self.kinds = [make_kind(rng) for _ in range(2)]
        self.num_requests = 0
        self.num_watchers = 0
        self.recent = []
        self.sequences = []
        self.holds = []

    def decide(self, side):
        """Yield operations, and receive the answer of `side` to each. Reads `side` but never changes it."""
        self.side = side
        self.pool = side.pools["gpu"]
        steps = {
            self.start: 14,
            self.cache: 16,
            self.cache_wrongly: 2,
            self.cache_partially: 8,
            self.move: 4,
            self.insert_key: 3,
            self.grow: 4,
            self.free: 9,
            self.unpin: 3,
            self.unpin_wrongly: 1,
            self.hold: 4,
            self.let_go: 4,
            self.evict: 4,
            self.evict_one: 3,
            self.reset: 1,
            self.free_all_and_reset: 1,
            self.take_events: 4,
            self.append_event: 1,
            self.emit: 2,
            self.look: 6,
            self.ask_too_much: 1,
            self.starve: 1,
            self.offload: 3,
            self.use_bare_blocks: 2,
            self.make_pool: 1,
        }
        if self.edits_map:
            steps[self.edit_map] = 6
        if self.options["observer"] == "collector":
            steps[self.drain_samples] = 3
        while True:
            (step,) = self.rng.choices(list(steps), list(steps.values()))
            yield from step()

    # ---- random choices ----------------------------------------------------------------------------

    def some_sequence(self):
        return self.rng.choice(self.sequences) if self.sequences else None

    def block_size(self, sequence):
        return sequence.stride * self.unit

    def count_full_blocks(self, sequence):
        hashes = self.side.requests[sequence.number].block_hashes
        return min(len(sequence.table), len(hashes) // sequence.stride)

    def some_key(self):
        """Return a key that may or may not be in the map."""
        rng = self.rng
        mapped = list(self.pool.cached_block_hash_to_block._cache)
        hashes = self.side.requests[rng.choice(self.recent)].block_hashes if self.recent else []
        if mapped and (not hashes or rng.random() < 0.5):
            return rng.choice(mapped).hex()
        block_hash = rng.choice(hashes) if hashes else b"unheard"
        return (block_hash + rng.randrange(len(self.strides)).to_bytes(4, "big")).hex()

    def some_block(self, *, null=False):
        """Return the id of any block of the pool; 0 only if `null`."""
        return self.rng.randrange(0 if null else 1, self.pool.num_gpu_blocks)

    def has_blocks(self):
        return self.pool.num_gpu_blocks > 1

    # ---- requests arrive, grow and finish ----------------------------------------------------------

    def new_request(self):
        rng = self.rng
        self.num_requests += 1
        num_tokens = rng.randrange(1, 12 * self.unit)
        self.recent = [*self.recent[-MAX_REQUESTS:], self.num_requests]
        yield [
            "request",
            {
                "number": self.num_requests,
                "prefix": rng.randrange(2),
                "fork": rng.randrange(num_tokens + 1),
                "num_tokens": num_tokens,
                "session": rng.choice([None, "s-1"]),
                **rng.choice(self.kinds),
            },
        ]
        return self.num_requests

    def start(self):
        rng = self.rng
        if self.recent and rng.random() < 0.35:
            number = rng.choice(self.recent)
        else:
            number = yield from self.new_request()
        request = self.side.requests[number]
        group_id = rng.randrange(len(self.strides))
        stride = self.strides[group_id]
        hits = []
        for block_hash in request.block_hashes[stride - 1 :: stride]:
            found = yield ["get_cached_block", "gpu", block_hash.hex(), [group_id]]
            if found is None or isinstance(found[0], str):  # bare blocks cannot be touched
                break
            hits += found
        if rng.random() < 0.2:  # a sliding window has passed them
            num_passed = rng.randrange(len(hits) + 1)
            hits[:num_passed] = [0] * num_passed
        if hits:
            yield ["touch", "gpu", hits, rng.choice(["list", "tuple"])]
        num_new = -(-request.num_tokens // (stride * self.unit)) - len(hits)
        new = yield ["get_new_blocks", "gpu", num_new]
        if not has_raised(new):
            self.sequences.append(Sequence(number, group_id, stride, hits + new, len(hits)))
        elif hits:
            yield ["free_blocks", "gpu", hits[::-1], "iterator"]

    def grow(self):
        sequence = self.some_sequence()
        if sequence is None:
            return
        yield ["grow", sequence.number, self.rng.randrange(1, 2 * self.unit + 1)]
        request = self.side.requests[sequence.number]
        num_missing = -(-request.num_tokens // self.block_size(sequence)) - len(sequence.table)
        if num_missing > 0:
            new = yield ["get_new_blocks", "gpu", num_missing]
            if not has_raised(new):
                sequence.table += new

    def free(self):
        rng = self.rng
        sequence = self.some_sequence()
        if sequence is None:
            return
        self.sequences.remove(sequence)
        names = sequence.table[::-1]
        if rng.random() < 0.3:
            names.insert(len(names) // 2, 0)
        if rng.random() < 0.2:
            strangers = yield ["get_new_blocks", "host", rng.randrange(1, 4)]
            if not has_raised(strangers):
                names[1:1] = strangers
        place = "host" if rng.random() < 0.1 else "gpu"
        yield ["free_blocks", place, names, rng.choice(["list", "iterator"])]

    def unpin(self):
        sequence = self.some_sequence()
        if sequence is None:
            return
        self.sequences.remove(sequence)
        self.num_watchers += 1
        names = [name for name in sequence.table if name != 0]
        yield ["unpin_blocks", "gpu", names, f"watcher-{self.num_watchers}"]

    def unpin_wrongly(self):
        wrong = [0]
        if self.has_blocks():
            wrong.append(self.some_block())
        name = self.rng.choice(wrong)
        if name == 0 or self.pool.blocks[name].ref_cnt == 0:
            yield ["unpin_blocks", "gpu", [name], "nobody"]

    def hold(self):
        """Add references: through the pool, or as copy-on-write does."""
        rng = self.rng
        sequence = self.some_sequence()
        if sequence is None or not sequence.table:
            return
        names = rng.choices(sequence.table, k=rng.randrange(1, 4))
        if rng.random() < 0.3:
            names = names[:1]
            yield ["add_reference", names[0]]
        else:
            yield ["touch", "gpu", names, rng.choice(["list", "tuple"])]
        if names != [0]:
            self.holds.append(names)

    def let_go(self):
        if self.holds:
            names = self.holds.pop(self.rng.randrange(len(self.holds)))
            yield ["free_blocks", "gpu", names, "list"]

    def free_all_and_reset(self):
        while self.sequences:
            yield from self.free()
        while self.holds:
            yield from self.let_go()
        yield ["reset_prefix_cache", "gpu"]
        yield ["reset_prefix_cache", "host"]

    def reset(self):
        yield ["reset_prefix_cache", self.rng.choice(["gpu", "host"])]

    def ask_too_much(self):
        for place in ("gpu", "host"):
            yield ["get_new_blocks", place, self.side.pools[place].get_num_free_blocks() + 1]

    def starve(self):
        num_free = self.pool.get_num_free_blocks()
        yield ["set_num_free_blocks", "gpu", 0]
        yield ["get_new_blocks", "gpu", 1]
        yield ["reset_prefix_cache", "gpu"]
        yield ["set_num_free_blocks", "gpu", num_free]

    # ---- prefixes ----------------------------------------------------------------------------------

    def cache(self):
        rng = self.rng
        sequence = self.some_sequence()
        if sequence is None:
            return
        first, size = sequence.num_cached, self.block_size(sequence)
        end = rng.randrange(first, max(first, self.count_full_blocks(sequence)) + 1)
        mask = [rng.random() < 0.7 for _ in range(end - first)] if rng.random() < 0.2 else None
        kept_before = False
        for offset, name in enumerate(sequence.table[first:end]):
            is_kept = name != 0 and (mask is None or mask[offset])
            if is_kept and self.is_refused(name, (first + offset + 1) * size):
                if kept_before:
                    end = first + offset
                    mask = mask and mask[:offset]
                else:  # nothing is cached before it, so the refusal changes nothing
                    sequence.num_cached += offset + 1
                break
            kept_before = kept_before or is_kept
        arguments = [sequence.number, sequence.table, first, end, size, sequence.group_id, mask]
        answer = yield ["cache_full_blocks", "gpu", *arguments]
        if not has_raised(answer):
            sequence.num_cached = end

    def is_refused(self, name, num_tokens):
        """Return True if this block is already cached for as many tokens."""
        block = self.side.blocks[name]
        covered = block.block_hash_num_tokens
        return block.block_hash is not None and (covered is None or covered >= num_tokens)

    def cache_wrongly(self):
        sequence = self.some_sequence()
        if sequence is None:
            return
        number, table, group_id = sequence.number, sequence.table, sequence.group_id
        size = self.block_size(sequence)
        end = self.count_full_blocks(sequence)
        yield ["cache_full_blocks", "gpu", number, table, end, end, size, group_id, None]
        if not end:
            return
        yield ["cache_full_blocks", "gpu", number, table, 0, end, size, group_id, [True] * (end + 1)]
        num_hashed = len(self.side.requests[number].block_hashes) * self.unit
        if self.unit > 1:
            yield ["cache_full_blocks", "gpu", number, table, 0, end, size + 1, group_id, None]
            yield ["cache_partial_block", "gpu", number, table[0], self.unit, group_id, size + 1, False]
            yield ["cache_partial_block", "gpu", number, table[0], self.unit + 1, group_id, size, False]
        num_tokens = self.rng.choice([0, num_hashed + self.unit])
        yield ["cache_partial_block", "gpu", number, table[0], num_tokens, group_id, size, False]

    def cache_partially(self):
        rng = self.rng
        sequence = self.some_sequence()
        if sequence is None or not sequence.table:
            return
        num_hashes = len(self.side.requests[sequence.number].block_hashes)
        if num_hashes:
            num_tokens = rng.randrange(1, num_hashes + 1) * self.unit
            name = rng.choice(sequence.table)
            size = self.block_size(sequence)
            arguments = [sequence.number, name, num_tokens, sequence.group_id, size, rng.random() < 0.1]
            yield ["cache_partial_block", "gpu", *arguments]

    def move(self):
        rng = self.rng
        sequence = self.some_sequence()
        if sequence is None or not sequence.table:
            return
        targets = [block.block_id for block in self.pool.blocks[1:] if block.block_hash is None]
        if not targets or rng.random() < 0.1:
            targets = list(range(1, self.pool.num_gpu_blocks))
        sources = [name for name in sequence.table if name in self.pool.cached_block_hashes_by_block]
        if not sources or rng.random() < 0.4:
            sources = sequence.table
        yield ["move_block_hashes", "gpu", rng.choice(sources), rng.choice(targets)]

    def insert_key(self):
        if self.has_blocks():
            num_tokens = self.rng.choice([None, self.unit, 4 * self.unit])
            yield ["_insert_block_hash", "gpu", self.some_key(), self.some_block(), num_tokens]

    def evict(self):
        rng = self.rng
        block_ids = [self.some_block(null=True) for _ in range(rng.randrange(4))]
        if rng.random() < 0.1:
            block_ids = [self.pool.num_gpu_blocks + rng.randrange(3)]
        yield ["evict_blocks", "gpu", block_ids]

    def evict_one(self):
        yield ["_maybe_evict_cached_block", "gpu", self.some_block(null=True)]

    def look(self):
        rng = self.rng
        groups = list(range(len(self.strides)))
        key = self.some_key()
        block_hash = key[:-8]
        mapped = list(self.pool.cached_block_hash_to_block._cache)
        if mapped:
            key = rng.choice(mapped).hex()
        looks = [
            ["get_cached_block", "gpu", block_hash, rng.sample(groups, len(groups))],
            ["get_cached_block", "gpu", block_hash, rng.choice([[], [-1], [2**32]])],
            ["get_one_block", "gpu", key],
            ["contain", "gpu", key, self.some_block(null=True)],
            ["is_block_writable", "gpu", self.some_block(null=True)],
            ["repr_block", self.some_block(null=True)],
            ["iter_blocks_after", "gpu", rng.choice([None, self.some_block(null=True)]), rng.randrange(5)],
            ["get_usage", "gpu"],
            ["get_num_free_blocks", "gpu"],
        ]
        yield rng.choice(looks)

    def edit_map(self):
        """Edit the map directly, as vLLM's tests do."""
        rng = self.rng
        key = self.some_key()
        found = self.pool.cached_block_hash_to_block.get_one_block(bytes.fromhex(key))
        edit = rng.choice(["insert", "pop", "take"])
        if edit == "insert":
            bare = [name for name in BARE if self.side.blocks[name].block_hash is None]
            if self.has_blocks() and rng.random() < 0.7:
                bare = [self.some_block()]
            if bare:
                yield ["insert_into_map", "gpu", key, rng.choice(bare)]
        elif edit == "pop":
            block_id = found.block_id if found is not None and rng.random() < 0.8 else 0
            yield ["pop_from_map", "gpu", key, block_id]
        elif found is not None:
            yield ["take_entry", "gpu", key]
            for step in rng.sample([self.cache, self.evict, self.free, self.move, self.start], 2):
                yield from step()
            yield ["put_entry_back", "gpu", key]

    # ---- other callers -----------------------------------------------------------------------------

    def offload(self):
        """Copy cached free blocks to the host pool, as vLLM's simple offloading does."""
        host = self.side.pools["host"]
        cursor = None
        free = self.pool.free_block_queue.get_all_free_blocks()
        if free and self.rng.random() < 0.5:
            cursor = self.side.names[id(self.rng.choice(free))]
        walked = yield ["iter_blocks_after", "gpu", cursor, 6]
        sources = []
        for name in walked:
            key = self.side.blocks[name].block_hash
            if key is not None and (yield ["get_one_block", "host", key.hex()]) is None:
                sources.append(name)
        sources = sources[: host.get_num_free_blocks()]
        if not sources:
            return
        targets = yield ["get_new_blocks", "host", len(sources)]
        yield ["touch", "gpu", sources, "list"]
        for source, target in zip(sources, targets, strict=True):
            block = self.side.blocks[source]
            yield ["_insert_block_hash", "host", block.block_hash.hex(), target, block.block_hash_num_tokens]
            for key in list(self.pool.cached_block_hashes_by_block.get(source, ())):
                yield ["_insert_block_hash", "host", key.hex(), target, None]
            if self.options["events"]:
                yield ["append_event", "host", int.from_bytes(block.block_hash[-12:-4], "big")]
        yield ["free_blocks", "host", targets, "list"]
        yield ["free_blocks", "gpu", sources, "iterator"]

    def use_bare_blocks(self):
        """Pass blocks made by no pool, which a pool treats as its own; vLLM's tests pass many."""
        rng = self.rng
        name = rng.choice(BARE)
        block = self.side.blocks[name]
        uses = [
            ["add_reference", name],
            ["touch", "gpu", [name], "list"],
            ["is_block_writable", "gpu", name],
            ["_maybe_evict_cached_block", "gpu", name],
            ["repr_block", name],
        ]
        if name != BARE[0] or block.block_hash is None:
            uses.append(["_insert_block_hash", "gpu", self.some_key(), name, None])
        if block.ref_cnt != 1:
            uses.append(["free_blocks", "gpu", [name], "list"])
        if self.recent:
            number = rng.choice(self.recent)
            if self.side.requests[number].block_hashes:
                if not self.is_refused(name, self.unit):
                    uses.append(["cache_full_blocks", "gpu", number, [name], 0, 1, self.unit, 0, None])
                if name != BARE[0] or block.block_hash is None:
                    uses.append(["cache_partial_block", "gpu", number, name, self.unit, 0, self.unit, False])
        yield rng.choice(uses)

    def emit(self):
        sequence = self.some_sequence()
        if sequence is not None:
            end = self.rng.randrange(self.count_full_blocks(sequence) + 1)
            size = self.block_size(sequence)
            yield ["emit_cached_block_events", "gpu", sequence.number, end, size, sequence.group_id]

    def append_event(self):
        yield ["append_event", self.rng.choice(["gpu", "host"]), self.rng.randrange(2**64)]

    def take_events(self):
        place = "gpu" if self.options["shares_events"] else self.rng.choice(["gpu", "gpu", "host"])
        yield ["take_events", place]

    def drain_samples(self):
        yield ["drain_samples"]

    def make_pool(self):
        yield ["make_pool", self.rng.choice([0, -1, 1, 2, True])]


def make_kind(rng):
    """Return adapter, images and salt of a request. Only requests that agree in these share prefixes."""
    images, end = [], 0
    for _ in range(rng.choice([0, 0, 1, 2, 3])):
        start = end + rng.randrange(6)
        end = start + rng.randrange(1, 9)
        images.append([start, end - start])
    return {"lora": rng.random() < 0.3, "images": images, "salt": rng.choice([None, None, "salt"])}
