"""`Lineage`: which cached prefixes continue which, and which may have been computed from bad content."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from kv_pool.manager.block_groups.block_table import ALL_TOKENS

_UNKNOWN = -1


class Lineage:
    """The hashes that blocks, requests and tiers know, each with the hashes of shorter prefixes.

    tokens   0      4      8      12           a block of 8 tokens knows the hash at its start only; a
    hashes   root <- a <--- b <--- c           request knows all hashes of its sequence
             root <-------- b
    """

    def __init__(self) -> None:
        self._num_tokens: dict[bytes, int] = {}
        self._num_shorter: dict[bytes, int] = {}  # of hashes that are known only as shorter prefixes, too
        # For each hash, shorter prefixes: the number of their tokens, and their hash.
        self._shorter: dict[bytes, list[tuple[int, bytes]]] = {}

    def add(
        self, block_hash: bytes, num_tokens: int, num_shorter: int, shorter: bytes, is_exact: bool = True
    ) -> None:
        """Add that the prefix with this hash begins with a shorter one, of 0 tokens or with a known hash.

        Args:
            is_exact: False if `num_tokens` is only an upper bound.
        """
        if is_exact:
            self._num_tokens[block_hash] = num_tokens
        else:
            self._num_tokens.setdefault(block_hash, num_tokens)
        self._shorter.setdefault(block_hash, []).append((num_shorter, shorter))
        self._num_shorter[shorter] = num_shorter

    def add_sequence(self, hashes: Sequence[bytes], unit: int) -> None:
        """Add the hashes of a sequence, one for each `unit` tokens."""
        shorter = b""
        for index, block_hash in enumerate(hashes):
            self.add(block_hash, (index + 1) * unit, index * unit, shorter)
            shorter = block_hash

    def count_tokens(self, block_hash: bytes) -> int:
        """Return the tokens of the prefix with this hash; 0 if neither it nor a longer one is known."""
        found = self._num_tokens.get(block_hash)
        return self._num_shorter.get(block_hash, 0) if found is None else found

    def list_inside(self, block_hash: bytes, start: int, unit: int) -> list[tuple[bytes, int]] | None:
        """Return the hashes of the same sequence that end between token `start` and this hash's end.

        Returns None if one of them is unknown.
        """
        inside: list[tuple[bytes, int]] = []
        num_tokens = self._num_tokens.get(block_hash, 0)
        while num_tokens - unit > start:
            for num_shorter, shorter in self._shorter.get(block_hash, ()):
                if num_shorter == num_tokens - unit:
                    block_hash, num_tokens = shorter, num_shorter
                    inside.append((shorter, num_shorter))
                    break
            else:
                return None
        return inside

    def judge(
        self, bad: Mapping[bytes, tuple[int, int]], inside: Sequence[tuple[bytes, int, int]] = ()
    ) -> "Verdicts":
        """Return for each hash whether its prefix contains a bad one. O(hashes).

        Args:
            bad: for each hash whose content is bad, the tokens of its prefix, and the first bad one of them.
            inside: bad blocks in which prefixes of unknown hashes end: the hash before the block (b"" if it
                is unknown, or for the first block), and the tokens before its start and its end.
        """
        ends = sorted({num_tokens for num_tokens, _ in bad.values()})
        verdicts = Verdicts(bad)
        for block_hash in sorted(self._num_tokens, key=self._num_tokens.__getitem__):
            num_tokens = self._num_tokens[block_hash]
            found = _UNKNOWN
            if num_tokens <= ends[0]:
                found = ALL_TOKENS
            else:
                for num_shorter, shorter in self._shorter[block_hash]:
                    first = verdicts.find(shorter) if num_shorter > 0 else ALL_TOKENS
                    if first == _UNKNOWN and num_shorter <= ends[0]:
                        first = ALL_TOKENS
                    if first == _UNKNOWN:
                        continue
                    if first < ALL_TOKENS:
                        found = min(found, first) if found >= 0 else first
                    elif found == _UNKNOWN and bisect_right(ends, num_shorter) == bisect_left(
                        ends, num_tokens
                    ):
                        found = ALL_TOKENS  # no bad prefix ends between the two
            verdicts.before[block_hash] = found
            if block_hash in bad:
                first = bad[block_hash][1]
                found = first if found == _UNKNOWN else min(found, first)
            verdicts.first[block_hash] = found
        for before, start, end in inside:
            after = self.judge({before: (start, start)}) if before else None
            for block_hash, num_tokens in self._num_tokens.items():
                if start < num_tokens < end and (after is None or after.find(block_hash) < ALL_TOKENS):
                    verdicts.first[block_hash] = min(max(0, verdicts.first[block_hash]), start)
        return verdicts


class Verdicts:
    """The result of `Lineage.judge`.

    Attributes:
        first: for each known hash, the first token of its prefix that is bad or was computed from a bad one.
        before: the same for the prefix without its last block.
    """

    def __init__(self, bad: Mapping[bytes, tuple[int, int]]) -> None:
        self._bad = bad
        self.first: dict[bytes, int] = {}
        self.before: dict[bytes, int] = {}

    def find(self, block_hash: bytes) -> int:
        found = self.first.get(block_hash, _UNKNOWN)
        if found == _UNKNOWN and block_hash in self._bad:
            found = self._bad[block_hash][1]
        return found

    def find_first_bad(self, block_hash: bytes) -> int:
        """Return the first token of the prefix that may be bad; 0 if nothing is known of it."""
        return max(0, self.find(block_hash))

    def is_good_before(self, block_hash: bytes) -> bool:
        """Return True if the prefix without its last block is known to be good."""
        return self.before.get(block_hash, _UNKNOWN) == ALL_TOKENS
