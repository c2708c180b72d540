"""`Life`: two nodes; each step is one random operation, and everything is checked after it."""

from collections import deque
from functools import partial

from lives import moving
from lives.checks import check_idle, check_node
from lives.contents import World
from lives.manager_node import GROUPS, ManagerNode

KINDS = ("manager", "manager with a window")
STEPS_TO_IDLE = 150


class Life:
    """One random life.

    Args:
        kind: one of KINDS.
        folder: for a disk tier; None for host memory alone.

    Attributes:
        operations: the last 30, each with its step, node, name and result.
        num_steps: so far.
    """

    def __init__(self, kind, seed, folder=None):
        self.kind, self.seed = kind, seed
        shape = "window" if kind.endswith("window") else "full"
        self.world = World(f"{kind} {seed}", len(GROUPS[shape]))
        self.nodes = [ManagerNode(self.world, name, shape, folder) for name in ("left", "right")]
        self.movings = []
        self.num_steps = 0
        self.operations = deque(maxlen=30)

    def run(self, num_steps):
        """Run steps; every 150 steps, and at the end, end everything; no block may stay in use."""
        try:
            for _ in range(num_steps):
                self.step()
                if self.num_steps % STEPS_TO_IDLE == 0:
                    self.rest()
            self.rest()
        finally:
            self.stop()

    def step(self):
        rng = self.world.rng
        self.num_steps += 1
        node = rng.choice(self.nodes)
        operations = node.list_operations()
        operations[self.wait] = 3
        operations[partial(self.migrate, node)] = 3
        operations[self.go_on] = 16 if self.movings else 0
        operations[self.break_off] = 0.5 if self.movings else 0
        operations[self.renew] = 3 if self.movings else 0
        (operation,) = rng.choices(list(operations), list(operations.values()))
        name = getattr(operation, "__name__", "migrate")
        self.operations.append([self.num_steps, node.name, name])
        for one in self.nodes:
            one.last_operation = name
        outcome = operation()
        self.operations[-1].append(outcome)
        self.world.tally[name] += 1
        self.check()

    def check(self):
        if self.world.finding is not None:
            raise self.world.finding
        for node in self.nodes:
            check_node(node, self.movings)

    # ---- operations on both nodes ----------------------------------------------------------------

    def wait(self):
        self.world.now += self.world.rng.choice((0.5, 1.0, 3.0))
        return self.world.now

    def migrate(self, source):
        if len(self.movings) < 4:
            begun = moving.begin(source, self.nodes[self.nodes[0] is source])
            if begun is not None:
                self.movings.append(begun)
                return begun.subject
        return None

    def go_on(self):
        if self.movings:
            one = self.world.rng.choice(self.movings)
            outcome = one.go_on()
            self.world.tally[outcome] += 1
            if one.is_over:
                self.movings.remove(one)
            return outcome
        return None

    def break_off(self):
        if self.movings:
            one = self.world.rng.choice(self.movings)
            outcome = one.break_off()
            if one.is_over:
                self.movings.remove(one)
            return outcome
        return None

    def renew(self):
        if self.movings:
            for one in self.movings:
                one.pull.renew()

    def stop(self):
        """Stop the threads of unfinished migrations."""
        for one in self.movings:
            one.turns.stop()

    def rest(self):
        """End all migrations, requests, plans, leases and directives."""
        self.operations.append([self.num_steps, "both", "rest"])
        for node in self.nodes:
            node.last_operation = "rest"
        self.world.is_calm = True
        while self.movings:
            one = self.movings[0]
            one.go_on() if self.world.chance(0.8) else one.break_off()
            if one.is_over:
                self.movings.remove(one)
        for node in self.nodes:
            node.source_role.close()
        for node in self.nodes:
            node.close()
        self.world.is_calm = False
        for node in self.nodes:
            check_idle(node)
            if self.world.chance(0.2):
                assert node.reset_caches()
        self.world.tally["rests"] += 1

    def describe(self):
        """Return the seed, the step and the last operations, for a finding."""
        lines = [f"{self.kind!r}, seed {self.seed}, step {self.num_steps}; the last operations:"]
        return "\n".join(lines + ["  " + " ".join(map(str, one)) for one in self.operations])


def live(kind, seed, num_steps, folder=None):
    """Run a life; a finding says where it happened. Returns the life."""
    life = Life(kind, seed, folder)
    try:
        life.run(num_steps)
    except BaseException as error:
        error.add_note(life.describe())
        raise
    return life
