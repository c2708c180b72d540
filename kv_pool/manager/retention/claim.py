"""`Claim`: the reason to keep a block, with its strength and its end."""

from collections.abc import Iterable
from math import inf
from typing import Final

PINNED: Final = 101
EXPIRED: Final = -1


class Claim:
    """A reason to keep a block: a directive without its range, or a session.

    Attributes:
        strength: the priority, or PINNED.
        duration_s: seconds after the block becomes free; inf for a session.
        until: a session's deadline; inf for a directive.
    """

    __slots__ = ("alone", "duration_s", "is_session", "strength", "until")

    def __init__(self, strength: int, duration_s: float, until: float, is_session: bool) -> None:
        self.strength: int = strength
        self.duration_s: float = duration_s
        self.until: float = until
        self.is_session: bool = is_session
        # The claims of a block that has this one only; always the same tuple, so it is compared by identity.
        self.alone: tuple[Claim, ...] = (self,)

    def find_end(self, freed_at: float) -> float:
        """Return the end of the claim for a block that became free at `freed_at`. Not in force at the end."""
        return self.until if self.is_session else freed_at + self.duration_s


NO_CLAIMS: Final[tuple[Claim, ...]] = ()

NOTHING: Final = Claim(EXPIRED, 0.0, inf, False)
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
        if claim.is_session or claim.duration_s != inf:
            return False
    return True


def find_strength(claims: tuple[Claim, ...]) -> int:
    """Return the strength of the strongest claim, or EXPIRED."""
    strength = EXPIRED
    for claim in claims:
        strength = max(strength, claim.strength)
    return strength
