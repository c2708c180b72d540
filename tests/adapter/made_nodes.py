"""Nodes over small pools of this process."""

from contextlib import ExitStack, contextmanager

from adapter.made_pool import fill, make, make_site, make_storage, take

from kv_pool.migration.backends.in_process import InProcessBackend
from kv_pool.migration.messages import NodeLocation
from kv_pool.migration.migrator import Migrator


@contextmanager
def running_nodes(*sizes, locations=None, **options):
    """Connected nodes a, b, ... over pools of so many blocks on devices 0, 1, ...; stopped at the end.

    `locations` are the nodes', the other options go to the pool of node a.
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
    """Sequences 1, 2, ... of so many blocks, with bytes."""
    for number, size in enumerate(sizes, 1):
        take(pool, number, size)
    fill(pool)
