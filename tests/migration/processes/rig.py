"""`Rig`: two nodes in separate processes, a flaky network between them, and the checks afterwards."""

import multiprocessing
import os
import random
import signal
from multiprocessing.connection import wait

from migration.processes import node_process
from migration.processes.flaky_proxy import NO_FAULTS, Faults, FlakyProxy

CONTEXT = multiprocessing.get_context("forkserver")
# Imported once, in the process from which the others are forked.
CONTEXT.set_forkserver_preload(["kv_pool.migration.pool_site", "kv_pool.migration.migrator"])
LEASE_S = 0.3
NUM_BLOCKS = 64
PATIENCE_S = 30.0
"""A timeout that only a hanging test exceeds."""

TARGET_STEPS = ["preparing", "reading", "inserting", "acknowledging", "done"]
SOURCE_STEPS = ["leased", "acknowledged"]
"""`leased` and `acknowledged`: before the reply is sent."""
FAULT_KINDS = ("none", "network", "network", "kill", "kill", "kill", "stop", "stop", "cancel", "cut")
ENDED = ("done", "failed", "cancelled")


class Node:
    """One process and its two pipes."""

    def __init__(self, name, peers, backend="tcp", lease_s=LEASE_S):
        self.name = name
        self.is_stopped = False
        self.commands, theirs = CONTEXT.Pipe()
        self.events, their_events = CONTEXT.Pipe()
        options = {
            "name": name,
            "peers": peers,
            "lease_s": lease_s,
            "num_blocks": NUM_BLOCKS,
            "backend": backend,
        }
        self.process = CONTEXT.Process(
            target=node_process.run, args=(theirs, their_events, options), daemon=True
        )
        self.process.start()
        theirs.close()
        their_events.close()

    def ask(self, name, *arguments, patience_s=PATIENCE_S):
        self.commands.send((name, arguments))
        if not self.commands.poll(patience_s):
            raise AssertionError(f"node {self.name} does not answer {name}{arguments}")
        is_right, result = self.commands.recv()
        if not is_right:
            raise NodeError(f"node {self.name}: {name}: {result}")
        return result

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.commands.close()
        self.events.close()

    def stop(self):
        os.kill(self.process.pid, signal.SIGSTOP)
        self.is_stopped = True

    def wake(self):
        os.kill(self.process.pid, signal.SIGCONT)
        self.is_stopped = False


class NodeError(AssertionError):
    """An error that a command raised in the process."""


class Rig:
    """Two nodes, `a` and `b`, each reached by the other through two proxies: for messages, and for blocks."""

    def __init__(self, backend="tcp", lease_s=LEASE_S, fault_kinds=FAULT_KINDS):
        self.backend = backend
        self.fault_kinds = fault_kinds
        self.lease_s = lease_s
        self.proxies = {name: FlakyProxy(name) for name in ("a", "b", "blocks of a", "blocks of b")}
        self.nodes = {}
        for name in "ab":
            self.start_node(name)

    def start_node(self, name):
        other = "b" if name == "a" else "a"
        peers = {other: self.proxies[other].address}
        self.nodes[name] = Node(name, peers, self.backend, self.lease_s)
        addresses = self.nodes[name].ask("get_addresses", patience_s=4 * PATIENCE_S)
        proxies = self.proxies[name], self.proxies[f"blocks of {name}"]
        for proxy, address in zip(proxies, addresses, strict=True):
            proxy.upstream = address
        self.nodes[name].ask("forward", int(proxies[1].address.rpartition(":")[2]))

    def close(self):
        for node in self.nodes.values():
            node.kill()
        for proxy in self.proxies.values():
            proxy.close()

    def run(self, seed):
        """One schedule. Returns what it did, in words."""
        schedule = Schedule(self, seed)
        try:
            schedule.run()
        except AssertionError as error:
            error.add_note(schedule.describe())
            raise
        return schedule.describe()


class Schedule:
    """A migration with faults, and the checks that no block is lost, shared or written late."""

    def __init__(self, rig, seed):
        self.rig = rig
        self.random = draw = random.Random(seed)
        self.seed = seed
        self.source, self.target = draw.choice(["ab", "ba"])
        self.kind = draw.choice(["sequence", "sequence", "sequence", "prefix", "blocks"])
        self.is_move = self.kind == "sequence" and draw.random() < 0.75
        self.is_push = draw.random() < 0.5
        self.is_slow = draw.random() < 0.25
        self.request_id = f"r{seed}"
        first = draw.randrange(10**6)
        self.token_ids = [first + position for position in range(draw.randint(1, 60))]
        if draw.random() < 0.2:
            self.token_ids = [*range(8), *self.token_ids]  # a prefix that the target may already have
        self.fault = draw.choice(rig.fault_kinds)
        if self.fault == "network":
            self.faults = Faults(
                corrupt=draw.choice([0.0, 0.01, 0.05]),
                corrupt_blocks=draw.choice([0.0, 0.01, 0.2]),
                swallow=draw.choice([0.0, 0.01, 0.05]),
                cut=draw.choice([0.0, 0.02, 0.1]),
                delay=draw.choice([0.0, 0.1]),
            )
        else:
            self.faults = NO_FAULTS
        side = draw.choice(["source", "target"])
        self.step = (side, draw.choice(SOURCE_STEPS if side == "source" else TARGET_STEPS))
        self.count = draw.randint(1, 4) if self.is_slow and self.step == ("target", "reading") else 1
        self.victim = draw.choice(["source", "target"])
        # Concurrent migrations in both directions: (from, to, request, is_push, migration).
        self.companions = [
            (*draw.choice(["ab", "ba"]), f"c{seed}-{number}", draw.random() < 0.5)
            for number in range(draw.choice([0, 0, 0, 1, 2]))
        ]
        self.is_woken_early = draw.random() < 0.2
        self.log = []

    def describe(self):
        what = f"{'move' if self.is_move else 'copy'} of a {self.kind} {self.source}->{self.target}"
        how = f"{'pushed' if self.is_push else 'fetched'}{', slowly' if self.is_slow else ''}"
        return (
            f"seed {self.seed}: {what}, {how}; {self.fault} "
            f"{self.faults if self.fault == 'network' else ''} "
            f"victim {self.victim} at {self.step} {self.count}, {len(self.companions)} beside it; "
            f"{'; '.join(self.log)}"
        )

    # ---- steps of a schedule ---------------------------------------------------------------------

    def run(self):
        nodes = self.rig.nodes
        self.killed = None
        self.is_reused = False
        nodes[self.source].ask("begin", self.request_id, self.token_ids)
        for name, _, request_id, _ in self.companions:
            nodes[name].ask("begin", request_id, self.tokens_of(request_id))
        self.drain_events()
        for name, proxy in self.rig.proxies.items():
            proxy.seed(f"{self.seed}{name}", self.faults)
        if self.fault in ("kill", "stop", "cancel", "cut"):
            side, step = self.step
            phase = {"leased": "reading", "acknowledged": self.acknowledged_phase()}.get(step, step)
            at = nodes[self.source if side == "source" else self.target]
            at.ask("pause_at", "out" if side == "source" else "in", phase, self.count)
        migration_id = self.begin()
        self.companion_ids = [self.begin_companion(*companion) for companion in self.companions]
        if self.fault in ("kill", "stop", "cancel", "cut"):
            self.strike(migration_id)
        else:
            self.wait_for_end(self.starter(), migration_id)
        self.finish(migration_id)

    def acknowledged_phase(self):
        return "acknowledging" if self.is_push else "done"

    def starter(self):
        return self.rig.nodes[self.source if self.is_push else self.target]

    def begin(self):
        block_ids = ()
        if self.kind == "blocks":
            block_ids = self.rig.nodes[self.source].ask("list_full_blocks", self.request_id)
        rate = 16384.0 * 20 if self.is_slow else 0.0
        how, peer = ("migrate", self.target) if self.is_push else ("fetch", self.source)
        return self.starter().ask(
            "migrate", how, self.kind, self.request_id, self.token_ids, peer, self.is_move, block_ids, rate
        )

    def tokens_of(self, request_id):
        return list(range(-len(request_id) + 10**7, 10**7 + random.Random(request_id).randint(1, 20)))

    def begin_companion(self, name, other, request_id, is_push):
        starter, how, peer = (name, "migrate", other) if is_push else (other, "fetch", name)
        return self.rig.nodes[starter].ask("migrate", how, "sequence", request_id, [], peer, True)

    def strike(self, migration_id):
        """Wait until the step is reached, then inject the fault of the schedule."""
        nodes = self.rig.nodes
        side, _ = self.step
        at = nodes[self.source if side == "source" else self.target]
        if not self.wait_for_pause(at, migration_id):
            self.log.append("ended before")
            return
        victim_name = self.source if self.victim == "source" else self.target
        victim = nodes[victim_name]
        other = nodes[self.target if self.victim == "source" else self.source]
        if self.fault == "kill":
            victim.kill()
            self.killed = self.victim
            self.rig.start_node(victim_name)
            if at is not victim:
                at.ask("go_on")
        elif self.fault == "stop":
            if at is not victim:
                victim.stop()
                at.ask("go_on")
            else:
                victim.stop()
            self.outlast(victim, other, migration_id)
            if at is victim:
                at.ask("go_on")
        elif self.fault == "cancel":
            was_in_time = victim.ask("cancel", migration_id) if self.may_cancel(victim) else None
            self.log.append(f"cancelled: {was_in_time}")
            at.ask("go_on")
        else:
            for proxy in self.rig.proxies.values():
                proxy.cut_all()
            at.ask("go_on")

    def may_cancel(self, victim):
        """Return True if this node knows the migration."""
        side, _ = self.step
        name = self.source if victim is self.rig.nodes[self.source] else self.target
        return name == (self.source if self.is_push else self.target) or side == "source"

    def outlast(self, victim, other, migration_id):
        """Suspend the victim until the other node has ended the transfer and reused its blocks."""
        if not self.is_woken_early:
            ended = ("failed", "cancelled", "done", "in doubt")
            self.wait_for_phase(other, migration_id, ended, self.rig.lease_s * 20)
            self.log.append(f"reused {other.ask('reuse', self.seed)}")
            self.is_reused = True
        victim.wake()

    def finish(self, migration_id):
        """Repair the network, wait for all migrations to end, and check the result."""
        nodes = self.rig.nodes
        for name, proxy in self.rig.proxies.items():
            proxy.seed(name, NO_FAULTS)
        for name in (self.source, self.target):
            left = nodes[name].ask("settle", PATIENCE_S / 2)
            assert not left, f"node {name} does not come to rest: {left}"
        for node in nodes.values():
            node.ask("give_reused_back")
        prompts = [self.token_ids, *(self.tokens_of(companion[2]) for companion in self.companions)]
        found = {name: node.ask("check", prompts) for name, node in nodes.items()}
        statuses = {
            name: {status[0]: status[1:] for status in node.ask("list_statuses")}
            for name, node in nodes.items()
        }
        self.log.append(f"at the end {found}")
        self.check_subject(found, statuses, migration_id)
        for (name, other, request_id, _), companion_id in zip(
            self.companions, self.companion_ids, strict=True
        ):
            self.check_move(found, statuses, request_id, name, other, companion_id)
        for name, requests in found.items():
            for request_id in requests:
                nodes[name].ask("finish", request_id)
        for node in nodes.values():
            assert node.ask("check", prompts) == []

    def check_subject(self, found, statuses, migration_id):
        """Check which nodes have the subject."""
        is_here = self.request_id in found[self.source]
        is_there = self.request_id in found[self.target]
        there = statuses[self.target].get(migration_id)
        self.log.append(f"here {statuses[self.source].get(migration_id)}, there {there}")
        if self.is_move:
            self.check_move(found, statuses, self.request_id, self.source, self.target, migration_id)
            late = (("source", "acknowledged"), ("target", "acknowledging"), ("target", "done"))
            if self.killed == "source" and self.step in late:
                assert is_there
        elif self.killed != "source":
            assert is_here
        if self.fault == "none":
            assert there is not None
            assert there[1] == "done", there
        if not self.is_move and self.killed is None and there is not None and there[1] == "done":
            if self.kind == "sequence":
                assert is_there
            else:
                if self.is_reused:
                    return
                num_hit = self.rig.nodes[self.target].ask("check_prefix", self.token_ids)
                assert num_hit == len(self.token_ids) // 4

    def check_move(self, found, statuses, request_id, source, target, migration_id):
        """Check that a sequence is at one node, or was lost with a killed process that had the only copy."""
        is_here, is_there = request_id in found[source], request_id in found[target]
        here, there = statuses[source].get(migration_id), statuses[target].get(migration_id)
        assert not (is_here and is_there), request_id
        dead = {None: None, "source": self.source, "target": self.target}[self.killed]
        if dead != target:
            assert is_there == (there is not None and there[1] == "done"), (request_id, there)
        if dead != source:
            assert is_here == (here is None or here[1] != "done"), (request_id, here)
        if dead is None:
            assert is_here or is_there, request_id

    # ---- watching --------------------------------------------------------------------------------

    def drain_events(self):
        for node in self.rig.nodes.values():
            while node.events.poll():
                node.events.recv()

    def wait_for_pause(self, at, migration_id):
        """Wait for the step; return False if the migration ended before it."""
        starter = self.starter()
        has_ended = False
        while True:
            readable = wait([node.events for node in self.rig.nodes.values()], PATIENCE_S)
            assert readable, "nothing happens"
            for events in readable:
                _, phase, found_id, is_paused = events.recv()
                if is_paused and events is at.events:
                    return True
                is_starters = events is starter.events and found_id == migration_id
                if is_starters and phase in ENDED:
                    has_ended = True
            if has_ended and not at.events.poll(0.05):
                at.ask("go_on")
                return False

    def wait_for_end(self, node, migration_id):
        self.wait_for_phase(node, migration_id, (*ENDED, "in doubt"), PATIENCE_S)

    def wait_for_phase(self, node, migration_id, phases, patience_s):
        """Wait until the node reports one of these phases of this migration, or until a timeout."""
        for found in node.ask("list_statuses"):
            if found[0] == migration_id and found[2] in phases:
                return
        while node.events.poll(patience_s):
            _, phase, found_id, _ = node.events.recv()
            if found_id == migration_id and phase in phases:
                return
