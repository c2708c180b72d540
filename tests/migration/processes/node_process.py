"""A node and its engine in a separate process, with one pipe for commands and one for phase reports."""

import threading
import time

from migration.made_nodes import MadeEngine

from kv_pool import KVPoolError
from kv_pool.core import invariants
from kv_pool.manager.invariants import check_manager
from kv_pool.migration.backends.tcp import TcpBackend
from kv_pool.migration.messages import BlocksSubject, PrefixSubject, SequenceSubject
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.peers import Peers

SECRET = b"known to both processes"
BLOCK_BYTES = 16384
PATIENCE_S = 15.0


def make_backend(kind, storage, lease_s):
    if kind == "tcp":
        return TcpBackend(storage, connect_s=lease_s)
    from kv_pool.migration.backends.nixl import NixlBackend

    return NixlBackend(storage)


class NodeProcess:
    """Executes commands (method name, arguments) and replies (True, result) or (False, error)."""

    def __init__(self, events, name, peers, lease_s, num_blocks, backend):
        self.events = events
        self.engine = MadeEngine(num_blocks, block_bytes=BLOCK_BYTES)
        known = Peers()
        for peer, address in peers.items():
            known.add(peer, address)
        self.pauses = {}
        self.going_on = threading.Event()
        self.migrator = Migrator(
            name,
            self.engine.site,
            backends=[make_backend(backend, self.engine.storage, lease_s)],
            secret=SECRET,
            listen="127.0.0.1:0",
            peers=known,
            lease_s=lease_s,
            on_phase=self.tell,
        )
        self.migrator.start()
        self.patterns = {}

    def tell(self, status):
        """The migrator's `on_phase`: report the change, and block there if a command requested it."""
        place = (status.direction, status.phase.value)
        is_companion = status.subject.startswith("sequence c")
        left = None if is_companion else self.pauses.get(place)
        is_paused = left == 1
        if left is not None:
            self.pauses[place] = left - 1
        if is_paused:
            self.going_on.clear()
        self.events.send((*place, status.migration_id, is_paused))
        if is_paused:
            self.going_on.wait()

    # ---- commands --------------------------------------------------------------------------------

    def get_addresses(self):
        """Return the addresses for messages and for bytes of blocks."""
        return self.migrator.address, f"127.0.0.1:{self.migrator._server.bulk.port}"

    def forward(self, port):
        """Tell readers this port instead of the one for bytes of blocks."""
        self.migrator._server.bulk.port = port

    def pause_at(self, direction, phase, count=1):
        """Block at the `count`-th report of this phase from now on."""
        self.pauses = {(direction, phase): count}

    def go_on(self):
        self.pauses = {}
        self.going_on.set()

    def begin(self, request_id, token_ids):
        self.engine.start(request_id, token_ids)

    def migrate(self, how, kind, request_id, token_ids, peer, is_move, block_ids=(), max_bytes_per_s=0.0):
        """Start to `fetch` from a peer, or to `migrate` to it."""
        subject = self.make_subject(kind, request_id, token_ids, block_ids)
        start = getattr(self.migrator, how)
        return start(subject, peer, is_move=is_move, max_bytes_per_s=max_bytes_per_s).migration_id

    def make_subject(self, kind, request_id, token_ids, block_ids):
        if kind == "sequence":
            return SequenceSubject(request_id)
        if kind == "prefix":
            return PrefixSubject(tuple(self.engine.hash_blocks(token_ids)))
        return BlocksSubject(tuple(block_ids))

    def list_full_blocks(self, request_id):
        with self.engine.lock:
            table = self.engine.manager.get_table(request_id)
            return [block.block_id for block in table.blocks if block.block_hash is not None]

    def cancel(self, migration_id):
        return self.migrator.find_migration(migration_id).cancel()

    def list_statuses(self):
        return [
            (status.migration_id, status.direction, status.phase.value, status.error, status.error_message)
            for status in self.migrator.list_migrations()
        ]

    def settle(self, timeout_s):
        """Wait until no migration is running and nothing is leased; return what still is at the timeout."""
        for status in self.migrator.list_migrations():
            migration = self.migrator.find_migration(status.migration_id)
            if not migration.wait_for_end(timeout_s):
                return repr(migration.get_status())
        deadline = time.monotonic() + timeout_s
        while self.engine.site.leases.list_leases():
            # Quarantine ends with its broken transfer, without a notification.
            if time.monotonic() > deadline:
                return repr(self.engine.site.leases.list_leases())
            time.sleep(0.01)
        return ""

    def reuse(self, seed):
        """Allocate every free block and overwrite it."""
        with self.engine.lock:
            blocks = self.engine.pool.get_new_blocks(self.engine.pool.get_num_free_blocks())
            for block in blocks:
                content = f"reused {seed} {block.block_id}"
                self.engine.storage.write_block(block.block_id, self.engine.make_bytes(content))
                self.patterns[block] = content
            return len(blocks)

    def give_reused_back(self):
        """Free those blocks after checking that their content is unchanged."""
        with self.engine.lock:
            for block, content in self.patterns.items():
                found = self.engine.storage.read_block(block.block_id)
                assert found == self.engine.make_bytes(content), f"block {block.block_id} was written to"
            self.engine.pool.free_blocks(list(self.patterns))
            self.patterns = {}

    def finish(self, request_id):
        self.engine.finish(request_id)

    def check(self, prompts):
        """Check everything while no migration runs; return the ids of the requests here."""
        engine = self.engine
        self.migrator.check_invariants()
        while True:
            # A suspended process answers pending requests when it resumes: its blocks stay leased, without a
            # reader, until that lease expires.
            assert self.settle(PATIENCE_S) == ""
            with engine.lock:
                if not engine.site.leases.list_leases():
                    self.check_at_rest(prompts)
                    return sorted(engine.requests)

    def check_at_rest(self, prompts):
        """Called with the lock held."""
        engine = self.engine
        with engine.lock:
            invariants.check(engine.pool)
            check_manager(engine.manager, engine.requests.values(), list(self.patterns))
            assert engine.site.leases.list_leases() == [], engine.site.leases.list_leases()
            assert engine.site.list_frozen() == []
            assert set(engine.manager.list_request_ids()) == set(engine.requests)
            held = {
                block_id
                for request_id in engine.requests
                for block_id in engine.manager.get_block_ids(request_id)
            }
            num_in_use = len(held) + len(self.patterns)
            assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1 - num_in_use
            for request_id in engine.requests:
                engine.check_bytes(request_id)
            engine.check_all_cached(prompts)

    def check_prefix(self, token_ids):
        return self.engine.check_prefix(token_ids)

    def stop(self):
        self.migrator.stop()


def run(commands, events, options):
    """Run the process: execute commands until the pipe is closed."""
    node = NodeProcess(events, **options)
    while True:
        try:
            name, arguments = commands.recv()
        except EOFError:
            return
        try:
            reply = (True, getattr(node, name)(*arguments))
        except (KVPoolError, AssertionError, TimeoutError) as error:
            reply = (False, f"{type(error).__name__}: {error}")
        commands.send(reply)
        if name == "stop":
            return
