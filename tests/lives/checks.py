"""Checks after each step: every byte, every reference, every hold, every numbered invariant.

References are those of tables, of pending copies and of holds; `list_held` says which holds there have to be.
"""

from collections import Counter

import numpy as np
from lives.router import check_router
from lives.source_role import OVER

from kv_pool.core.holds import Hold
from kv_pool.manager.invariants import check_leases, check_manager
from kv_pool.manager.leases import Lease
from kv_pool.manager.retention.invariants import check_retention
from kv_pool.migration import invariants as migration_invariants
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers import invariants as tier_invariants
from kv_pool.tiers.invariants import check_swapper

# Operations that take blocks and free none.
TAKING = {"admit", "begin_load", "swap_in", "read_tiers", "compact", "lease_blocks", "write", "go_on"}


def check_node(node, movings):
    """Check one node. O(blocks)."""
    for promise in node.list_promises():
        promise.check()
    for writer in node.writers:
        writer.check()
    check_leases(node.leases)
    leases = [*node.readers, *(writer.lease for writer in node.writers if isinstance(writer.lease, Lease))]
    if Counter(map(id, leases)) != Counter(map(id, node.leases.list_leases())):
        raise AssertionError(f"{node.name}: {node.leases.list_leases()} are leased, not {leases}")
    check_cached(node, node.device)
    if node.world.chance(node.events_share):
        check_router(node)
    check_tiers(node)
    check_manager_node(node)
    check_migrations(node, movings)
    held = Counter(block.block_id for block in list_held(node, movings))
    found = Counter(block.block_id for hold in node.pool.holds.list_holds() for block in hold.blocks)
    if held != found:
        raise AssertionError(
            f"{node.name}: the holds are {sorted(found.items())}, not {sorted(held.items())}"
        )


def check_migrations(node, movings):
    """Check M1 to M8, and that the source's leases match its table."""
    pulls = [moving.pull for moving in movings if moving.target is node] + node.holding
    source_role = node.source_role
    with node.site.lock:
        migration_invariants.check_source(source_role.transfers)
        migration_invariants.check_pulls(node.site, pulls, list_quarantines(node))
    leased = {transfer.message.transfer_id for transfer in source_role.transfers.list_prepared()}
    assert leased == source_role.departures.keys(), f"{node.name} leases something else than it says"
    for transfer_id, departure in source_role.departures.items():
        state = source_role.find_state(transfer_id)
        if departure.lease in node.readers and state != OVER:
            assert departure.lease.deadline == state, "the lease has another deadline"
    leaving = [one.sequence for one in source_role.departures.values() if one.sequence is not None]
    assert set(leaving) == set(node.leaving)
    assert sorted(node.site.list_frozen()) == sorted(sequence.name for sequence in leaving)


def list_quarantines(node):
    return [writer.lease for writer in node.writers if isinstance(writer.lease, Hold)]


def list_held(node, movings):
    """Return the held blocks, once for each hold."""
    blocks = [block for lease in node.leases.list_leases() for block in lease.blocks]
    blocks += [block for moving in movings if moving.target is node for block in moving.reserved]
    blocks += [block for hold in list_quarantines(node) for block in hold.blocks]
    blocks += node.touched
    for departure in node.source_role.departures.values():
        blocks += departure.blocks if departure.sequence is not None else []
    blocks += list_planned(node)
    blocks += set(node.manager.copies._source_of.values())
    return blocks + node.retention._placed.held.blocks


def list_planned(node):
    blocks = [
        block
        for plan in node.swapper.list_open_plans()
        for block in plan.list_blocks(node.swapper.manager)
        if not block.is_null
    ]
    return blocks + [
        block
        for plan in node.onboarder.list_open_plans()
        for block in plan.list_blocks()
        if not block.is_null
    ]


def check_manager_node(node):
    requests = [sequence.request for sequence in [*node.running, *node.loading]]
    check_manager(node.manager, requests)
    check_retention(node.retention)
    check_swapper(node.swapper)
    tier_invariants.check(node.onboarder)
    check_cached(node, node.host)
    check_pinned(node)
    check_held_keys(node)
    assert sorted(node.swapper.list_swapped_out()) == sorted(one.name for one in node.swapped)
    assert sorted(node.manager.list_request_ids()) == sorted(one.request_id for one in requests)
    plans = [*node.swapper.list_open_plans(), *node.onboarder.list_open_plans()]
    assert {plan.request_id for plan in plans} == {one.name for one in node.planned}
    directed = node.retention._ranges.keys()
    here = [*node.waiting, *node.running, *node.loading, *node.swapped, *node.planned, *node.leaving]
    assert directed <= {one.name for one in here}, f"directives of {directed} are left"
    for sequence in node.running:
        check_sequence(node, sequence, sequence.request.num_computed_tokens)
    for sequence, (_, num_present) in node.loading.items():
        for group_id, block_ids in enumerate(node.list_tables(sequence)):
            start = node.groups[group_id].count_skipped_tokens(sequence.request.num_computed_tokens)
            node.device.check(block_ids, sequence, start, num_present, group_id)
    for sequence in node.swapped:
        num_computed = sequence.request.num_computed_tokens
        for group_id, group in enumerate(node.groups):
            block_ids = node.swapper.get_host_block_ids(sequence.name, group_id)
            start = group.count_skipped_tokens(num_computed)
            node.host.check(block_ids, sequence, start, num_computed, group_id)


def check_pinned(node):
    """Check that pinned blocks are still cached, unless the last operation may have ended pins."""
    cached = node.pool.cached_block_hash_to_block
    if node.last_operation in TAKING:
        for key in node.pinned_keys:
            if cached.get_one_block(key) is None:
                raise AssertionError(f"{node.name}: a pinned block was evicted by {node.last_operation}")
    pinned = node.retention._placed.pinned
    node.pinned_keys = [block.block_hash for block in pinned if block.block_hash is not None]


def check_held_keys(node):
    """Check that tiers have the blocks that open plans read, unless these were invalid or found no room."""
    for opened in node.planned.values():
        may_lack = opened.is_void or node.cache.num_dropped > opened.num_dropped
        if node.is_onboard_plan(opened) and not may_lack and not node.cache.has_all(opened.plan.keys):
            raise AssertionError(f"{node.name}: a tier evicted what {opened.plan!r} is to read")


def check_sequence(node, sequence, end):
    """Check all bytes that the next token of a request attends to."""
    for group_id, block_ids in enumerate(node.list_contents(sequence)):
        start = node.groups[group_id].count_skipped_tokens(end)
        node.device.check(block_ids, sequence, start, end, group_id)


def check_cached(node, side):
    """Check that cached blocks hold the bytes promised under their keys."""
    promised = node.world.promised
    pool = side.pool
    for block in pool.blocks:
        if block.block_hash is not None:
            keys = [block.block_hash, *pool.cached_block_hashes_by_block.get(block.block_id, ())]
            for key in keys:
                if not np.array_equal(side.kv[block.block_id], promised[key]):
                    raise AssertionError(
                        f"{node.name}: block {block.block_id} is cached, and has {side.kv[block.block_id]}, "
                        f"not {promised[key]}"
                    )


def check_tiers(node):
    """Check the bytes in tiers, and of pending blocks; a disk is read in one step of twenty."""
    cache, promised = node.cache, node.world.promised
    for key, block in cache._pending.items():
        if not np.array_equal(node.device.kv[block.block_id], promised[key]):
            raise AssertionError(f"{node.name}: {block!r} was overwritten before a tier had it")
    for level, tier in enumerate(cache.tiers):
        if level and not node.world.chance(0.05):
            continue
        keys = tier.list_keys()
        read = tier.read(keys)
        assert not read.failed
        content = np.zeros((len(keys) + 1, node.device.kv.shape[1]), np.uint64)
        moves = list(zip(read.block_ids, range(len(keys)), strict=True))
        if moves:
            read.storage.copy_to(BlockStorage.wrap_state([content]), moves)
        for key, row in zip(read.keys, content, strict=False):
            if not np.array_equal(row, promised[key]):
                raise AssertionError(
                    f"{node.name}: the tier for {tier.medium} has {row}, not {promised[key]}"
                )


def check_idle(node):
    """Check that no block is in use, held, leased or planned."""
    pool = node.pool
    check_node(node, [])
    if pool.get_num_free_blocks() != node.num_blocks:
        in_use = {block.block_id: block.ref_cnt for block in pool.blocks[1:] if block.ref_cnt}
        raise AssertionError(f"{node.name}: idle, and these blocks have references: {in_use}")
    held = [hold for hold in pool.holds.list_holds() if hold.blocks]
    if held:
        raise AssertionError(f"{node.name}: idle, and {held} are held")
    if node.leases.list_leases() or node.leases.num_leased_blocks:
        raise AssertionError(f"{node.name}: idle, and {node.leases.list_leases()} are leased")
    if node.cache._stack._held:
        raise AssertionError(f"{node.name}: idle, and tiers hold {len(node.cache._stack._held)} keys")
    assert node.host.pool.get_num_free_blocks() == node.host.pool.num_gpu_blocks - 1
    assert not node.manager.list_request_ids()
    assert not node.manager.take_block_copies()
    assert not node.site.list_frozen()
    assert not node.retention.num_pins
