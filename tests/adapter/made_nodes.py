"""Nodes over small pools in this process."""

from contextlib import ExitStack, contextmanager

from adapter.made_pool import fill, make, make_site, make_storage, take

from kv_pool.migration.backends.in_process import InProcessBackend
from kv_pool.migration.messages import NodeLocation
from kv_pool.migration.migrator import Migrator


@contextmanager
def running_nodes(*sizes, locations=None, **options):
    """Yield connected nodes a, b, ... over pools of the given sizes on devices 0, 1, ...; stop them at the
    end.

    `locations` are those of the nodes; the other options go to the pool of node a.
    """
    with ExitStack() as stack:
        nodes = []
        for number, size in enumerate(sizes):
            pool = make(size, device_id=number, storage=make_storage(size + 1), **({} if number else options))
            site = make_site(pool)
            backends = [InProcessBackend(pool.storage)]
            location = NodeLocation() if locations is None else locations[number]
            node = stack.enter_context(Migrator("abcdef"[number], site, backends=backends, location=location))
            for other in nodes:
                other.connect(node)
            nodes.append(node)
        yield nodes
        for node in nodes:
            node.check_invariants()


def take_all(pool, *sizes):
    """Allocate sequences 1, 2, ... with the given numbers of blocks, and write bytes."""
    for number, size in enumerate(sizes, 1):
        take(pool, number, size)
    fill(pool)
