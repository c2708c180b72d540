"""`Claim`: a reason to keep a block; `Record`: the claims that a set of blocks share."""

from collections.abc import Iterable
from typing import Final

from mypy_extensions import i32, i64

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER, TimedItem

PINNED: Final = 101
EXPIRED: Final = -1


class Claim:
    """A reason to keep a block: a directive without its range, or a session, which has a deadline.

    Attributes:
        strength: the priority, or PINNED.
        duration_s: seconds after the block becomes free; NEVER for a session.
        until: a session's deadline; NEVER for a directive.
    """

    __slots__ = ("alone", "duration_s", "is_session", "strength", "until")

    def __init__(self, strength: int, duration_s: float, until: float = NEVER) -> None:
        self.strength: int = strength
        self.duration_s: float = duration_s
        self.until: float = until
        self.is_session: bool = until != NEVER
        # The claims of a block that has this one only; always the same tuple, so it is compared by identity.
        self.alone: tuple[Claim, ...] = (self,)

    def find_end(self, freed_at: float) -> float:
        """Return the end of the claim for a block that became free at `freed_at`. Not in force at the end."""
        return self.until if self.is_session else freed_at + self.duration_s


NO_CLAIMS: Final[tuple[Claim, ...]] = ()

NOTHING: Final = Claim(EXPIRED, 0.0)
"""The claim of a directive without effect; any other outranks it."""


def join_claims(in_order: Iterable[Claim]) -> tuple[Claim, ...]:
    """Return the directives' claims that no other of them outlives and outranks.

    Args:
        in_order: sorted by `rank_claim`.
    """
    left: list[Claim] = []
    for claim in in_order:
        if not left or claim.duration_s > left[-1].duration_s:
            left.append(claim)
    return left[0].alone if len(left) == 1 else tuple(left)


def rank_claim(claim: Claim) -> tuple[int, float]:
    """Return the sort key of a directive's claim: the strongest first, of these the longest."""
    return -claim.strength, -claim.duration_s


def add_claims(claims: tuple[Claim, ...], added: tuple[Claim, ...]) -> tuple[Claim, ...]:
    """Return these claims and those of directives, without directives' that another outlives and outranks.

    No claim in `added` outlives and outranks another.

    So a block shared by thousands of requests has at most one such claim for each strength. Returns the same
    object if nothing is added. O(n log n) for n claims.
    """
    if not claims:
        return added
    if claims == added:  # the usual case of a prefix that many requests share
        return claims
    directives = [claim for claim in claims if not claim.is_session]
    joined = join_claims(sorted([*directives, *added], key=rank_claim))
    if set(joined) == set(directives):
        return claims
    return (*[claim for claim in claims if claim.is_session], *joined)


def is_pin(claims: tuple[Claim, ...]) -> bool:
    """Return True if one of the claims is a pin."""
    return find_strength(claims) == PINNED


def list_live(claims: tuple[Claim, ...], freed_at: float, now: float) -> tuple[Claim, ...]:
    """Return the claims in force now on a block freed at `freed_at`; the same object if all are."""
    for claim in claims:
        if claim.find_end(freed_at) <= now:
            return tuple(claim for claim in claims if claim.find_end(freed_at) > now)
    return claims


def is_lasting(claims: tuple[Claim, ...]) -> bool:
    """Return True if no claim ends before the blocks lose their content."""
    for claim in claims:  # noqa: SIM110 (a loop compiles to C, a generator does not)
        if claim.is_session or claim.duration_s != NEVER:
            return False
    return True


def find_strength(claims: tuple[Claim, ...]) -> int:
    """Return the strength of the strongest claim, or EXPIRED."""
    strength = EXPIRED
    for claim in claims:
        strength = max(strength, claim.strength)
    return strength


class Record(TimedItem):
    """The claims that a set of blocks share.

    Attributes:
        claims: never empty.
        strength: the strength of the strongest claim.
        is_lasting: True if no claim ends before the blocks lose their content.
        is_shared: True for the one record of all blocks with these claims. Otherwise the record is for blocks
            that became free together.
        freed_at: when these blocks became free.
        blocks: these blocks, in that order; blocks that now have another number are still listed.
        num_blocks: number of blocks with its number, or with its negative, which marks void claims.
        changes_at: when the next claim ends for free blocks; NEVER for a shared record.
    """

    __slots__ = (
        "blocks",
        "claims",
        "freed_at",
        "is_lasting",
        "is_shared",
        "num_blocks",
        "retention_id",
        "strength",
    )

    def __init__(self, claims: tuple[Claim, ...]) -> None:
        super().__init__(NEVER)
        self.claims: tuple[Claim, ...] = claims
        self.strength: int = find_strength(claims)
        self.is_lasting: bool = is_lasting(claims)
        self.is_shared: bool = True
        self.freed_at: float = 0.0
        self.blocks: list[KVCacheBlock] = []
        self.num_blocks: int = 0
        self.retention_id: int = 0

    def be_about(self, blocks: list[KVCacheBlock], freed_at: float) -> None:
        """Make this the record of these blocks alone, which became free together at `freed_at`."""
        self.blocks = blocks
        self.freed_at = freed_at
        self.is_shared = False
        self.changes_at = self.find_next_end()

    def find_next_end(self) -> float:
        """Return when the next claim ends; NEVER for a shared record."""
        next_end = NEVER
        if not self.is_shared:
            for claim in self.claims:
                next_end = min(next_end, claim.find_end(self.freed_at))
        return next_end


def cut_by_number(blocks: list[KVCacheBlock], skips_empty: bool = False) -> list[list[KVCacheBlock]]:
    """Return the stretches of consecutive blocks that have the same number.

    Args:
        skips_empty: leave out the blocks without content.
    """
    stretches: list[list[KVCacheBlock]] = []
    number: i32 = 0
    start: i64 = -1  # of the open stretch; -1 if none is open
    for index, block in enumerate(blocks):
        is_skipped = skips_empty and block.key is None
        if start >= 0 and (is_skipped or block.retention_id != number):
            stretches.append(blocks[start:index])
            start = -1
        if start < 0 and not is_skipped:
            start = index
            number = block.retention_id
    if start == 0:
        stretches.append(blocks)
    elif start > 0:
        stretches.append(blocks[start:])
    return stretches
