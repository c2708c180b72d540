"""The changing calls of a manager, its retention and its leases."""

from interrupt_cases.case import Case, Subject

from kv_pool import (
    BlockHasher,
    BlockLeases,
    BlockPool,
    BlockRetention,
    FullAttentionSpec,
    KVCacheManager,
    LeaseKind,
    MambaSpec,
    Request,
    RetentionDirective,
    SlidingWindowSpec,
)
from kv_pool.manager.invariants import check_leases, check_manager

HASHER = BlockHasher("sha256", "s", 4)
GROUPS = {
    "full": (FullAttentionSpec(block_size=4),),
    "window": (FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=9)),
    "mamba": (FullAttentionSpec(block_size=4), MambaSpec(block_size=4)),
}


class Managing(Subject):
    """A manager with two running requests, one of which shares a prefix, and a finished one."""

    def __init__(self, kind, keeps=False):
        self.pool = BlockPool(40, True, 4, enable_kv_cache_events=True)
        retention = BlockRetention(self.pool, clock=lambda: 0.0, max_pinned_blocks=8) if keeps else None
        self.manager = KVCacheManager(self.pool, groups=GROUPS[kind], retention=retention)
        self.leases = BlockLeases(self.pool, clock=lambda: 0.0)
        self.requests = []
        self.finish(self.start("ended", range(20)))
        self.first = self.start("first", [*range(16), 90, 91, 92])
        self.second = self.start("second", [*range(40, 57)])
        self.lease = self.leases.acquire(self.list_blocks(self.first)[:1], 5.0, "a reader")
        self.before = {one.request_id: self.list_ids(one) for one in self.requests}

    def list_blocks(self, request):
        table = self.manager.get_table(request.request_id)
        return [block for block in table.blocks if not block.is_null]

    def list_ids(self, request):
        return [
            self.manager.get_block_ids(request.request_id, group) for group in range(len(self.manager.groups))
        ]

    def start(self, name, tokens):
        request = Request(name, tokens, HASHER)
        if self.manager.retention is not None:
            self.manager.retention.set_directives(name, [RetentionDirective(0, 8, pin=name == "ended")])
        prefix = self.manager.get_computed_blocks(request)
        assert (
            self.manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix) is not None
        )
        self.manager.take_block_copies()
        request.num_computed_tokens = request.num_tokens
        self.requests.append(request)
        return request

    def finish(self, request):
        self.requests.remove(request)
        self.manager.free(request)

    def grow(self):
        self.first.append_output_token_ids([1, 2, 3, 4, 5])
        self.manager.allocate_slots(self.first, 5)

    def admit(self):
        request = Request("third", [*range(12), *range(70, 80)], HASHER)
        prefix = self.manager.get_computed_blocks(request)
        self.manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)

    def fork(self):
        child = Request("child", self.first.all_token_ids, HASHER)
        child.num_computed_tokens = self.first.num_computed_tokens
        self.manager.fork(self.first, child)

    def is_interrupted(self):
        return self.pool.is_changing

    def repair(self):
        self.manager.repair()

    def call_next(self):
        request = Request("next", range(200, 205), HASHER)
        if self.manager.allocate_slots(request, 5) is not None:
            self.manager.take_block_copies()
            self.manager.free(request)

    def check(self, is_repaired):
        check_leases(self.leases)
        known = [one for one in self.requests if self.manager.holds_blocks(one.request_id)]
        for request in known:
            for before, after in zip(self.before[request.request_id], self.list_ids(request), strict=True):
                kept = after[: len(before)]
                assert all(new in (old, 0) for old, new in zip(before, kept, strict=False)), (
                    "blocks were exchanged"
                )
        assert len(known) >= len(self.requests) - 1
        for name in ("third", "child", "first", "second"):
            if self.manager.holds_blocks(name):
                self.manager.free(Request(name, [1], HASHER))
        self.manager.take_block_copies()
        for lease in self.leases.list_leases():
            lease.release()
        if self.manager.retention is not None:
            self.manager.retention.release_all()
        check_manager(self.manager, [])
        assert self.pool.get_num_free_blocks() == 39, "blocks have leaked"


CALLS = {
    "allocate_slots, running": Managing.grow,
    "allocate_slots, new": Managing.admit,
    "free": lambda subject: subject.manager.free(subject.second),
    "fork": Managing.fork,
    "report_invalid_blocks": lambda subject: subject.manager.report_invalid_blocks([2]),
    "evict_blocks": lambda subject: subject.manager.evict_blocks([1]),
    "truncate": lambda subject: subject.manager.truncate(subject.first, 17),
    "acquire": lambda subject: subject.leases.acquire(
        subject.list_blocks(subject.second)[:2], 9.0, "a reader", LeaseKind.READ
    ),
    "release": lambda subject: subject.lease.release(),
}
KEPT_CALLS = {
    **{name: CALLS[name] for name in ("allocate_slots, new", "free")},
    "change_directives": lambda subject: subject.manager.retention.change_directives(
        subject.first, [RetentionDirective(0, 12, pin=True)]
    ),
    "keep_session": lambda subject: subject.manager.retention.keep_session("s", subject.first, 9.0),
    "set_directives": lambda subject: subject.manager.retention.set_directives(
        "first", [RetentionDirective(0, 12, priority=80)]
    ),
}
CASES = [
    Case(
        f"{kind} {name}",
        lambda kind=kind, keeps=keeps: Managing(kind, keeps),
        call,
    )
    for kind, keeps, calls in (
        ("full", False, CALLS),
        ("window", False, CALLS),
        ("mamba", False, CALLS),
        ("full", True, {f"retained {name}": call for name, call in KEPT_CALLS.items()}),
    )
    for name, call in calls.items()
    if not (kind == "mamba" and name == "truncate")
]
