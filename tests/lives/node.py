"""`Node`: the companions of a manager: bytes, leases, reuse watchers, tiers and compaction."""

import shutil

import numpy as np
from lives.contents import BLOCK_SIZE, Side
from lives.promises import Promise, Writer
from lives.router import Router
from lives.source_role import SourceRole

from kv_pool import CopyFailedError
from kv_pool.contiguous import compaction
from kv_pool.contiguous.defragmenter import Defragmenter
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.manager.leases import LeaseKind, LeaseState
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.host_tier import HostTier
from kv_pool.tiers.tiered_cache import TieredCache

NUM_SPARE = 3
NUM_HOST_BLOCKS = (2, 4, 8)
NUM_DISK_BLOCKS = 16


class Node:
    """A pool with its bytes and companions; `ManagerNode` is one with a manager.

    Attributes:
        readers: leases to read, each with its reader's expected bytes.
        writers: leases to write, those of migrations as well.
        touched: blocks read by a connector that has a reference and a hold, with its promise.
        watched: blocks that the connector has freed, and reads until they are reused.
        promises: the bytes expected by open plans, frozen tables and arriving blocks, until they end.
        events_share: share of the steps in which events are taken.
        holding: pulls that hold arrived blocks, or did.
        grown: blocks added to the pool, less blocks removed.
        num_restarts: restarts of the tiers after a lost process; each has its own folder.
    """

    def __init__(self, world, name, num_blocks, folder):
        self.world = world
        self.rng = world.rng
        self.name = name
        self.num_blocks = num_blocks
        self.folder = folder
        self.readers, self.writers, self.watched, self.promises, self.touched = {}, [], {}, [], {}
        self.holding = []
        self.grown = self.num_restarts = 0
        self.last_operation = ""
        self.router = Router(world.blocks)
        self.events_share = self.rng.choice((0.03, 1.0))

    def open(self, pool, site, device):
        """Set the objects that `ManagerNode` has created."""
        self.pool, self.site, self.device = pool, site, device
        self.leases = site.leases
        self.source_role = SourceRole(self)
        self.defragmenter = Defragmenter(
            self, interval_s=1.0, max_moves=2, max_evictions=1, clock=self.world.read_clock
        )

    def make_device(self, pool):
        return Side(pool, self.num_blocks + NUM_SPARE + 1)

    # ---- tiers -----------------------------------------------------------------------------------

    def open_tiers(self):
        """Open the tiers over the folder."""
        storage = self.device.storage
        tiers = [HostTier(self.rng.choice(NUM_HOST_BLOCKS), storage, medium="HOST")]
        if self.folder is not None:
            tiers.append(
                DiskTier(self.name_folder(), NUM_DISK_BLOCKS, BlockLayout.describe(storage, BLOCK_SIZE))
            )
        write = self.rng.choice(("back", "through"))
        self.cache = TieredCache(self.pool, storage, tiers, write, enable_events=True, max_prefetch_blocks=0)

    def name_folder(self):
        return self.folder / f"{self.name} {self.num_restarts}"

    def restart_tiers(self):
        """Reopen the tiers. No-op while tiers hold keys for open plans."""
        if self.cache._stack._held:
            return "held"
        if self.world.chance(0.7):
            self.cache.flush()
        disk = self.cache.tiers[1]
        keys = set(disk.list_keys())
        is_lost = self.world.chance(0.4)
        # A process that dies after an interrupted write or removal leaves the header; close() wipes it.
        interrupted = set(disk._unwiped.values()) - keys if is_lost else set()
        if is_lost:  # only blocks written by now remain
            before = self.name_folder()
            self.num_restarts += 1
            shutil.copytree(before, self.name_folder())
        self.cache.close()
        self.open_tiers()
        found = set(self.cache.tiers[1].list_keys())
        came_back = found - keys - interrupted
        assert keys <= found, f"{len(keys - found)} blocks were lost"
        assert not came_back, f"{len(came_back)} removed blocks came back"
        assert not self.cache.tiers[1].reopened.num_dropped
        self.world.tally["lost" if is_lost else "closed", bool(found)] += 1
        return "lost" if is_lost else "closed"

    # ---- leases ----------------------------------------------------------------------------------

    def lease_blocks(self):
        """Lease cached blocks, or the blocks of a running request, to a reader."""
        is_written = {block for writer in self.writers for block in writer.ids}
        if self.world.chance(0.5):
            blocks = [block for block in self.pool.blocks if block.block_hash is not None]
            blocks = self.rng.sample(blocks, min(len(blocks), self.rng.randint(1, 3)))
            slots = None
        else:
            blocks, slots = self.draw_table()
        deadline = self.world.now + self.rng.choice((1.0, 3.0, 9.0))
        if not blocks:
            return "nothing"
        try:
            lease = self.leases.acquire(blocks, deadline, "a reader")
        except InvalidBlockError:
            assert is_written.intersection(blocks)
            return "refused"
        self.readers[lease] = Promise(self.device, blocks, "leased to a reader", slots)
        return lease

    def release_lease(self):
        if readers := self.list_readers():
            lease = self.rng.choice(readers)
            del self.readers[lease]
            lease.release()

    def extend(self):
        if readers := self.list_readers():
            self.rng.choice(readers).extend(self.world.now + 4.0)

    def list_readers(self):
        """Return the leases to read that do not belong to a migration."""
        return [lease for lease in self.readers if lease.holder == "a reader"]

    def expire(self):
        """End leases to read that are overdue; leases to write are quarantined."""
        if self.world.chance(0.3):
            self.source_role.expire()
        for lease in self.leases.expire():
            assert lease.deadline <= self.world.now
            self.world.tally["expired", lease.kind.name] += 1
            if lease.kind is LeaseKind.READ:
                self.readers.pop(lease, None)
        late = [writer.lease for writer in self.writers if writer.is_late]
        assert [one for one in self.leases.list_leases() if one.state is LeaseState.QUARANTINED] == late

    def write(self):
        """Let a transfer write some of its slots, and end after the last; its request may be gone."""
        writers = [writer for writer in self.writers if writer.owed is not None]
        if writers:
            writer = self.rng.choice(writers)
            writer.write_owed(self.rng.randint(1, 9))
            if not writer.owed:
                self.finish_writing(writer)

    def finish_writing(self, writer):
        writer.end()

    def begin_writing(self, blocks, holder):
        deadline = self.world.now + self.rng.choice((1.0, 4.0, 20.0))
        return Writer(self, self.leases.acquire(blocks, deadline, holder, LeaseKind.WRITE))

    def write_late(self, writer):
        """Let a transfer continue alone after its migration was aborted."""
        writer.owed = [
            (block_id, slot, self.rng.getrandbits(63))
            for block_id in self.rng.sample(list(writer.rows), min(3, len(writer.rows)))
            for slot in range(BLOCK_SIZE)
        ]

    # ---- migrations ------------------------------------------------------------------------------

    def release_held(self):
        """Release the blocks that a pull holds."""
        if self.holding:
            pull = self.holding.pop(self.rng.randrange(len(self.holding)))
            self.readers.pop(pull.held, None)
            pull.release()
            assert not pull.is_holding()

    def deliver_late(self):
        return self.source_role.deliver_late() if self.source_role.late else None

    # ---- reuse watchers --------------------------------------------------------------------------

    def touch(self):
        """Let a connector read a cached block, with a reference and a hold."""
        blocks = [block for block in self.pool.blocks if block.block_hash is not None and block.ref_cnt]
        blocks = [block for block in blocks if block not in self.touched and block not in self.watched]
        if blocks and len(self.touched) < 3:
            block = self.rng.choice(blocks)
            hold = self.pool.hold([block], "read by a connector")
            self.touched[block] = hold, self.expect(self.device, [block], "read by a connector")

    def watch(self):
        """Release the reference, and read on until the block is reused."""
        if self.touched:
            block = self.rng.choice(list(self.touched))
            hold, promise = self.touched.pop(block)
            self.end(promise)
            self.watched[block] = promise
            self.pool.touch([block])
            hold.release()
            self.pool.unpin_blocks([block], self.note_reuse)

    def note_reuse(self, block):
        self.watched.pop(block).check()
        self.world.tally["reused"] += 1

    # ---- other ids -------------------------------------------------------------------------------

    def compact(self):
        pool, copy = self.pool, self.device.storage.apply_moves
        self.break_copies(0.15)
        limits = {
            "max_moves": self.rng.choice((None, 1, 3)),
            "max_evictions": self.rng.choice((0, 0, 2)),
            "on_moved": self.note_moved,
        }
        way = self.rng.choice(("pack", "gather", "run", "shrink", "defragment", "defragmenter"))
        try:
            match way:
                case "pack":
                    compaction.pack(pool, copy, **limits)
                case "gather":
                    compaction.gather(pool, copy, run_length=self.rng.choice((2, 4)), **limits)
                case "run":
                    num_blocks = self.rng.randint(1, 6)
                    if num_blocks <= pool.get_num_free_blocks():
                        run = compaction.take_run(pool, num_blocks, copy, self.note_moved)
                        pool.free_blocks(run or [])
                case "shrink":
                    way = self.resize()
                case "defragment":
                    self.defragment(self.rng.choice((0, 2)), limits["max_moves"])
                case "defragmenter":
                    self.defragmenter.step()
        except CopyFailedError:
            way = f"{way}, broken off"
        finally:
            self.device.copy.num_good = None
        self.world.tally[way] += 1
        return way

    def break_copies(self, share):
        """Let the next copies fail, with a probability of `share`."""
        self.device.copy.num_good = self.rng.choice((0, 1, 3)) if self.world.chance(share) else None

    def resize(self):
        if self.grown == 0 or (self.grown < NUM_SPARE and self.world.chance(0.3)):
            count = self.rng.randint(1, NUM_SPARE - max(0, self.grown))
            if self.world.chance(0.5):
                self.pool.add_blocks(count)
                self.grown += count
                return "grow"
        count = self.rng.randint(1, 3)
        if self.grown - count < -3:
            return "no resize"
        try:
            self.shrink_pool(count)
        except (InvalidArgumentError, InvalidBlockError, ValueError):
            return "cannot shrink"
        self.grown -= count
        return "shrink"

    def shrink_pool(self, count):
        compaction.shrink(self.pool, count, self.device.storage.apply_moves, on_moved=self.note_moved)

    def note_moved(self, relocation):
        """Bring tables up to date."""
        self.world.tally["moved"] += len(relocation.moves)

    def restore_size(self):
        if self.grown < 0:
            self.pool.add_blocks(-self.grown)
        elif self.grown > 0:
            if self.watched:  # they would not move
                assert self.reset_caches()
            self.shrink_pool(self.grown)
        self.grown = 0

    def get_fragmentation_rate(self):
        return self.pool.get_fragmentation_rate(4)

    # ---- faults ----------------------------------------------------------------------------------

    def corrupt(self, block):
        """Overwrite a block with garbage; no promise covers it any more."""
        self.pool.flush_evicted()  # flush the block's old content before it is overwritten
        self.device.kv[block.block_id] = np.uint64(2**63)
        self.forget_content([block])

    def forget_content(self, blocks):
        for block in blocks:
            for promise in [*self.readers.values(), *self.watched.values(), *self.promises]:
                if promise.side is self.device:
                    promise.forget(block)

    # ---- promises of plans -----------------------------------------------------------------------

    def expect(self, side, blocks, reason, slots=None):
        promise = Promise(side, blocks, reason, slots)
        self.promises.append(promise)
        return promise

    def end(self, *promises):
        for promise in promises:
            self.promises.remove(promise)

    def list_promises(self):
        return [*self.promises, *self.readers.values(), *self.watched.values()]

    # ---- the operations --------------------------------------------------------------------------

    def list_operations(self):
        """Return the operations that may happen now, with their weights."""
        return {
            self.lease_blocks: 2,
            self.release_lease: 1.5 if self.readers else 0,
            self.extend: 0.5 if self.readers else 0,
            self.expire: 2 if self.readers or self.writers else 0,
            self.write: 5 if self.writers else 0,
            self.release_held: 0.5 if self.holding else 0,
            self.deliver_late: 1 if self.source_role.late else 0,
            self.touch: 1,
            self.watch: 1 if self.touched else 0,
            self.compact: 4,
            self.restart_tiers: 0.0 if self.folder is None else 0.5,
        }

    def close_common(self):
        """End all readers, writers and connectors."""
        while self.holding:
            self.release_held()
        while self.readers:
            self.release_lease()
        while self.writers:
            writer = self.writers[0]
            writer.write_owed(len(writer.owed))
            writer.end()
        while self.touched:
            self.watch()


def count_filled(num_blocks, num_computed):
    """Return how many slots of each block of a table are computed."""
    return [max(0, min(BLOCK_SIZE, num_computed - at * BLOCK_SIZE)) for at in range(num_blocks)]
