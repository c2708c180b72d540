"""Arguments of a wrong type, and negative counts, are refused with the argument's name and change nothing."""

import inspect
import re

import numpy as np
import pytest

from kv_pool import (
    BlockAllocationRequest,
    BlockHasher,
    BlockLeases,
    BlockPool,
    BlockRetention,
    GPUKVPool,
    InvalidArgumentError,
    InvalidTypeError,
    KVCacheManager,
    KVPoolError,
    LeaseKind,
    Request,
    RetentionDirective,
)
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.control import ControlledManager
from kv_pool.core.eviction_order import BandPolicy
from kv_pool.core.invariants import check
from kv_pool.manager.batch_block_table import BatchBlockTable
from kv_pool.manager.slot_mapping import SlotMapping

HASHER = BlockHasher("sha256", block_size=4)


class Things:
    """A pool in use, and valid arguments for each public method of the objects built on it."""

    def __init__(self, pool_type):
        self.pool = pool_type(24, True, 4, enable_kv_cache_events=True)
        self.retention = BlockRetention(self.pool, lambda: 0.0, max_pinned_blocks=4)
        self.manager = KVCacheManager(self.pool, retention=self.retention)
        self.first = Request("first", range(10), HASHER)
        self.manager.allocate_slots(self.first, 10)
        self.first.num_computed_tokens = 10
        self.new = Request("new", range(10), HASHER)
        self.held = self.manager.get_table("first").blocks
        self.spare = self.pool.get_new_blocks(2)
        self.leases = BlockLeases(self.pool, lambda: 0.0)
        self.lease = self.leases.acquire(self.held[:1], 5.0, "reader")
        self.batch = BatchBlockTable(4, 8, 4)
        self.batch.add_request("first", self.manager.get_table("first"))
        self.batch.update()
        self.slots = SlotMapping(self.batch, 16)
        self.adapter = GPUKVPool(20, 4, placement="oldest")
        self.adapter.allocate(BlockAllocationRequest(3, 1))
        self.scattered = KVCacheManager(RunBlockPool(12, True, 4))
        spare = self.scattered.block_pool.get_new_blocks(2)
        self.scattered.allocate_slots(Request("behind", range(8), HASHER), 8)
        self.scattered.free_blocks(spare)
        self.controlled = ControlledManager(self.scattered, copy=list, on_moved=list)

    def draw(self):
        """Return everything that a call could have changed."""
        check(self.pool)
        check(self.adapter.block_pool)
        return [
            [
                (block.block_id, block.ref_cnt, block.block_hash, block.generation)
                for pool in (self.pool, self.adapter.block_pool)
                for block in pool.blocks
            ],
            [
                block.block_id
                for pool in (self.pool, self.adapter.block_pool)
                for block in pool.free_block_queue.get_all_free_blocks()
            ],
            list(self.pool.kv_event_queue),
            [(name, self.manager.get_block_ids(name)) for name in self.manager.list_request_ids()],
            [(one.lease_id, one.deadline, one.state) for one in self.leases.list_leases()],
            (self.retention.num_retained, self.retention.num_pins, self.retention.list_sessions()),
            self.batch.block_ids.tolist(),
            self.slots.slots.tolist(),
            [(one, self.adapter.blocks_of(one)) for one in self.adapter.list_sequences()],
            self.adapter.num_pinned_blocks,
            self.scattered.get_block_ids("behind"),
        ]

    def list_calls(self):
        """Return for each class its methods by name, with valid arguments."""
        first, new, spare, held = self.first, self.new, self.spare, self.held
        request = BlockAllocationRequest(1, 2)
        pool = {
            "get_new_blocks": {"num_blocks": 1},
            "take_blocks": {"blocks": self.pool.free_block_queue.get_all_free_blocks()[:1]},
            "touch": {"blocks": held},
            "free_blocks": {"ordered_blocks": spare},
            "unpin_blocks": {"blocks": spare, "on_reuse": print},
            "is_block_writable": {"block": spare[0]},
            "evict_blocks": {"block_ids": [1]},
            "repair": {"blocks": held},
            "swap_block_ids": {"pairs": [(1, 2)]},
            "hold": {"blocks": held, "reason": "read by a test", "movable": False, "until": 1e12},
            "explain_holds": {"block_id": 1},
            "open_bands": {"policy": BandPolicy()},
            "open_policy": {"policy": "lru"},
            "move_to_band": {
                "blocks": self.pool.free_block_queue.get_all_free_blocks()[:1],
                "band": 5,
            },
            "add_blocks": {"num_blocks": 1},
            "remove_last_blocks": {"num_blocks": 1},
            "get_cached_block": {"block_hash": first.block_hashes[0], "kv_cache_group_ids": [0]},
            "find_cached_prefix": {
                "block_hashes": first.block_hashes,
                "max_num_blocks": 2,
                "kv_cache_group_id": 0,
            },
            "list_keys": {"blocks": held},
            "cache_full_blocks": {
                "request": new,
                "blocks": spare,
                "num_cached_blocks": 0,
                "num_full_blocks": 2,
                "block_size": 4,
                "kv_cache_group_id": 0,
                "block_mask": [True, True],
            },
            "emit_cached_block_events": {
                "request": first,
                "num_cached_blocks": 1,
                "block_size": 4,
                "kv_cache_group_id": 0,
            },
            "cache_partial_block": {
                "request": first,
                "block": spare[0],
                "num_tokens": 4,
                "kv_cache_group_id": 0,
                "block_size": 4,
                "replace_existing_hashes": False,
            },
            "move_block_hashes": {"src_block": held[0], "dst_block": spare[0]},
        }
        if isinstance(self.pool, RunBlockPool):
            pool |= {
                "get_new_blocks_after": {"block": held[-1], "num_blocks": 1},
                "get_new_run": {"num_blocks": 2},
                "get_fragmentation_rate": {"run_length": 4},
                "track_fragmentation_rate": {"run_length": 4},
                "get_unusable_share": {"run_length": 4},
            }
        counts = {
            "num_lookahead_tokens": 0,
            "num_external_computed_tokens": 0,
            "num_encoder_tokens": 0,
            "full_sequence_must_fit": False,
            "reserved_blocks": 0,
            "num_in_flight_tokens": 0,
        }
        prefix = self.manager.get_computed_blocks(new)
        admitted = {"request": new, "num_new_tokens": 2, "cached_prefix": prefix}
        named = {"request_id": "first", "group_id": 0}
        return [
            (self.pool, pool),
            (
                self.manager,
                {
                    "get_computed_blocks": {"request": new, "max_num_tokens": 8},
                    "holds_blocks": {"request_id": "first"},
                    "get_table": named,
                    "get_block_ids": named,
                    "list_step_ends": {"request": new, "cached_prefix": prefix},
                    "fits_alone": {"num_tokens": 8, "num_encoder_tokens": 0, "cached_prefix": prefix},
                    "explain_fit": {"num_tokens": 8, "num_encoder_tokens": 0, "cached_prefix": prefix},
                    "count_max_blocks": {"num_tokens": 8, "num_encoder_tokens": 0},
                    "can_allocate": admitted | counts,
                    "allocate_slots": admitted | counts | {"delay_cache_blocks": False},
                    "fork": {"parent": first, "child": new},
                    "cache_blocks": {"request": first, "num_computed_tokens": 8},
                    "evict_blocks": {"block_ids": [1]},
                    "evict_owned": {"adapter": "sql", "cache_salt": "a", "session_id": "chat"},
                    "attach_retention": {"retention": self.retention},
                    "report_invalid_blocks": {"block_ids": [1]},
                    "release_skipped_blocks": {"request": first, "num_tokens": 8},
                    "truncate": {"request": first, "num_tokens": 8},
                    "free": {"request": first},
                    "pop_tables": {"request_id": "first"},
                    "put_tables": {"request_id": "new", "tables": []},
                    "forget_tables": {"request_id": "first"},
                    "free_blocks": {"blocks": spare},
                },
            ),
            (
                self.retention,
                {
                    "set_directives": {"request_id": "first", "directives": [RetentionDirective(0, 4)]},
                    "change_directives": {"request": first, "directives": [RetentionDirective(0, 4)]},
                    "keep_session": {"session_id": "chat", "request": first, "until": 9.0, "priority": 50},
                    "end_session": {"session_id": "chat"},
                },
            ),
            (
                self.leases,
                {
                    "acquire": {"blocks": held, "deadline": 9.0, "holder": "me", "kind": LeaseKind.READ},
                },
            ),
            (self.lease, {"extend": {"deadline": 9.0}}),
            (
                self.batch,
                {
                    "get_row_number": {"request_id": "first"},
                    "add_request": {"request_id": "new", "table": self.manager.get_table("first")},
                    "remove_request": {"request_id": "first"},
                    "swap_rows": {"row_number": 0, "other_row_number": 0},
                },
            ),
            (
                self.slots,
                {
                    "fill_decode": {"positions": np.array([3]), "num_slots": 4},
                    "fill_chunks": {
                        "query_start_loc": np.array([0, 2]),
                        "first_positions": np.array([3]),
                        "num_slots": 4,
                    },
                },
            ),
            (
                HASHER,
                {
                    "hash_blocks": {"token_ids": [1, 2, 3, 4], "parent": HASHER.root, "extra_keys": [None]},
                    "hash_request": {"request": first},
                },
            ),
            (
                self.new,
                {"append_output_token_ids": {"token_ids": [1]}, "truncate": {"num_tokens": 2}},
            ),
            (
                self.controlled,
                {
                    "defragment": {"max_evictions": 0, "max_moves": 3, "goal": 0.5},
                    "list_victims": {"num_blocks": 1},
                },
            ),
            (
                self.adapter,
                {
                    "allocate": {"request": request},
                    "try_allocate": {"request": request},
                    "allocate_many": {"requests": [request]},
                    "fork": {"parent_id": 1, "child_id": 2, "num_blocks": 1},
                    "cache_prefix": {
                        "sequence_id": 1,
                        "block_hashes": first.block_hashes,
                        "token_ids": range(8),
                    },
                    "claim_prefix": {"sequence_id": 2, "block_hashes": first.block_hashes, "priority": 0},
                    "free": {"block_ids": self.adapter.blocks_of(1)[:1], "sequence_id": 1},
                    "free_many": {"batches": [[1]]},
                    "free_sequence": {"sequence_id": 1},
                    "evict": {"num_blocks": 1},
                    "list_victims": {"num_blocks": 1, "priority": 0, "sequence_id": 1},
                    "pin": {"block_ids": self.adapter.blocks_of(1)[:1], "sequence_id": 1},
                    "unpin": {"block_ids": self.adapter.blocks_of(1)[:1], "sequence_id": 1},
                    "blocks_of": {"sequence_id": 1},
                    "note_access": {"sequence_id": 1},
                    "get_block_info": {"block_id": 1},
                    "count_available": {"priority": 0},
                    "defragment": {"max_evictions": 0, "max_moves": 1, "goal": 0.5},
                    "grow": {"num_blocks": 1},
                    "shrink": {"num_blocks": 1},
                    "connect": {"peer": GPUKVPool(4, 4, device_id=1)},
                    "migrate_blocks": {"block_ids": [1], "target_device_id": 1},
                    "migrate_sequence": {"sequence_id": 1, "target_device_id": 1},
                    "try_migrate_blocks": {"block_ids": [1], "target_device_id": 1},
                },
            ),
        ]


class Wrong:
    """A type that no parameter accepts."""


WRONG_VALUES = {int: ["1", 1.5, Wrong()], str: [5, Wrong()], bool: ["yes", Wrong()], float: ["1", Wrong()]}
PARTS = {"add_references", "drop_references", "place_in_band"}
REPORTS = {"read_sequences", "count_held", "report_sequence"}  # called by views, with ids that the pool gave
NOT_WALKED = {
    BlockPool: PARTS,  # parts of larger calls, which check the arguments
    RunBlockPool: PARTS,
    KVCacheManager: {
        "add_host",  # called by a swapper, with a weak reference
    },
    GPUKVPool: {"attach", "dump", "load", *REPORTS},  # these involve a node, and a file
    ControlledManager: REPORTS,
    BlockRetention: {  # called by the manager
        "attach",
        "list_lasting_pins",
        "note_started",
        "note_leaving",
        "note_ended",
        "will_pin",
        "forget_request",
        "note_released",
        "forget_blocks",
    },
}


def list_wrong_values(value):
    """Return values of other types, and for a sequence one with an element of another type."""
    wrong = WRONG_VALUES.get(type(value), ["a", 5, Wrong()])
    if isinstance(value, list) and value != [True, True]:  # these may have any truth value
        return [*wrong, [Wrong()] * max(1, len(value))]
    return wrong


def list_methods(thing):
    return {
        name
        for name in dir(type(thing))
        if not name.startswith("_")
        and callable(getattr(type(thing), name))
        and len(inspect.signature(getattr(type(thing), name)).parameters) > 1
    }


THINGS = [BlockPool, RunBlockPool]


def list_cases():
    for pool_type in THINGS:
        for number, (thing, calls) in enumerate(Things(pool_type).list_calls()):
            for name, arguments in calls.items():
                for argument in arguments:
                    where = f"{type(thing).__name__}.{name}({argument})"
                    yield pytest.param(pool_type, number, name, argument, id=where)
            if pool_type is RunBlockPool:
                break  # the others are the same


@pytest.mark.parametrize(("pool_type", "number", "name", "argument"), list(list_cases()))
def test_wrong_type_names_the_argument_and_changes_nothing(pool_type, number, name, argument):
    things = Things(pool_type)
    thing, calls = things.list_calls()[number]
    valid = calls[name]
    before = things.draw()
    for wrong in list_wrong_values(valid[argument]):
        with pytest.raises(KVPoolError) as raised:
            getattr(thing, name)(**valid | {argument: wrong})
        assert isinstance(raised.value, InvalidTypeError), (wrong, raised.value)
        assert argument in str(raised.value), wrong
        assert things.draw() == before


NONE = {
    "find_cached_prefix": {"max_num_blocks"},
    "emit_cached_block_events": {"num_cached_blocks"},
    "cache_full_blocks": {"num_full_blocks"},
}
"""Counts that mean none if they are negative, as in vLLM."""
COUNT = re.compile(r"(num|max)_\w+|reserved_blocks|goal|run_length")


def list_counts():
    for case in list_cases():
        pool_type, number, name, argument = case.values
        value = Things(pool_type).list_calls()[number][1][name][argument]
        if type(value) in (int, float) and COUNT.fullmatch(argument) and argument not in NONE.get(name, ()):
            yield case


@pytest.mark.parametrize(("pool_type", "number", "name", "argument"), list(list_counts()))
def test_a_negative_count_is_refused_and_changes_nothing(pool_type, number, name, argument):
    things = Things(pool_type)
    thing, calls = things.list_calls()[number]
    before = things.draw()
    with pytest.raises(InvalidArgumentError, match=r"(?<!\w)-1\b") as raised:
        getattr(thing, name)(**calls[name] | {argument: -1})
    if argument in str(raised.value):  # others say what -1 was asked for in words
        assert re.search(rf"\b{argument} (is )?-1\b", str(raised.value))
    assert things.draw() == before


def make_numpy(value):
    """Return the value with NumPy's integers in place of ints."""
    if type(value) is int:
        return np.int64(value)
    if isinstance(value, list | tuple) and {type(one) for one in value} <= {int, tuple}:
        return type(value)(map(make_numpy, value))
    return value


def list_calls_with_ints():
    for pool_type in THINGS:
        for number, (thing, calls) in enumerate(Things(pool_type).list_calls()):
            for name, arguments in calls.items():
                if any(make_numpy(value) is not value for value in arguments.values()):
                    yield pytest.param(pool_type, number, name, id=f"{type(thing).__name__}.{name}")
            if pool_type is RunBlockPool:
                break  # the others are the same


@pytest.mark.parametrize(("pool_type", "number", "name"), list(list_calls_with_ints()))
def test_numpy_integers_work_like_ints(pool_type, number, name):
    outcomes = []
    for convert in (lambda value: value, make_numpy):
        things = Things(pool_type)
        thing, calls = things.list_calls()[number]
        arguments = {key: convert(value) for key, value in calls[name].items()}
        try:
            getattr(thing, name)(**arguments)
        except KVPoolError as error:
            outcomes.append((repr(error), things.draw()))
        else:
            outcomes.append((None, things.draw()))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("pool_type", THINGS)
def test_every_public_method_with_arguments_is_tested(pool_type):
    for thing, calls in Things(pool_type).list_calls():
        expected = list_methods(thing) - NOT_WALKED.get(type(thing), set())
        assert calls.keys() == expected, type(thing).__name__
        for name, arguments in calls.items():
            parameters = list(inspect.signature(getattr(thing, name)).parameters)
            assert sorted(parameters) == sorted(arguments), name
