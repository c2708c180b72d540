"""Random events of several publishers, applied to the mirror and to a slow model with full scans."""

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_pool import AllBlocksCleared, BlockRemoved, BlockStored
from kv_pool.events.mirror import PrefixMirror

PUBLISHERS = ("a", "b", "c")
COUNTING = {"a": True, "b": False, "c": True}
MEDIA = ("GPU", "CPU")
NUM_TOKENS = 3  # tokens 0 to 2, so that prefixes are shared often
DEPTH = 3

prefixes = st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=DEPTH).map(tuple)
steps = st.lists(
    st.tuples(
        st.sampled_from(PUBLISHERS),
        st.sampled_from(["store"] * 6 + ["remove"] * 5 + ["clear", "clear publisher", "remove publisher"]),
        prefixes,
        st.integers(0, DEPTH - 1),
        st.sampled_from(MEDIA),
        st.sampled_from((0, 1)),
    ),
    max_size=60,
)


def hash_of_prefix(prefix):
    """Return a unique hash per prefix: its tokens as digits of a number, after a leading 1."""
    number = 1
    for token in prefix:
        number = number * NUM_TOKENS + token
    return number


class SlowMirror:
    """Per publisher, the number of copies of each (group, medium, prefix)."""

    def __init__(self):
        self.copies = {publisher: Counter() for publisher in PUBLISHERS}

    def store(self, publisher, place):
        copies = self.copies[publisher]
        copies[place] = copies[place] + 1 if COUNTING[publisher] else 1

    def remove(self, publisher, place):
        copies = self.copies[publisher]
        copies[place] -= 1
        if copies[place] <= 0:
            del copies[place]

    def get_blocks(self, publisher):
        return {(group, medium, hash_of_prefix(prefix)) for group, medium, prefix in self.copies[publisher]}

    def find(self, prefix, medium):
        """Group 1 is a sliding window and is not searched."""
        found = {}
        for publisher, copies in self.copies.items():
            count = 0
            for end in range(1, len(prefix) + 1):
                held = any((0, one, prefix[:end]) in copies for one in MEDIA if medium in (None, one))
                if not held:
                    break
                count += 1
            if count:
                found[publisher] = count
        return found


def make_store(prefix, first, medium, group):
    """Return a store of blocks `first` to the end of `prefix`; each block is one token, twice."""
    first = min(first, len(prefix) - 1)
    hashes = [hash_of_prefix(prefix[: end + 1]) for end in range(first, len(prefix))]
    tokens = [token for token in prefix[first:] for _ in range(2)]
    parent = hash_of_prefix(prefix[:first]) if first else None
    kind = "sliding_window" if group else "full_attention"
    return BlockStored(
        hashes, parent, tokens, 2, None, medium, None, group_idx=group, kv_cache_spec_kind=kind
    )


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=steps)
def test_mirror_matches_a_full_scan(steps):
    mirror = PrefixMirror(learns_tokens=True)
    model = SlowMirror()
    for publisher, what, prefix, first, medium, group in steps:
        mirror.add_publisher(publisher, counts_copies=COUNTING[publisher])
        place = (group, medium, prefix)
        if what == "store":
            mirror.apply(publisher, [make_store(prefix, first, medium, group)])
            for end in range(min(first, len(prefix) - 1), len(prefix)):
                model.store(publisher, (group, medium, prefix[: end + 1]))
        elif what == "remove":
            mirror.apply(publisher, [BlockRemoved([hash_of_prefix(prefix)], medium, group)])
            model.remove(publisher, place)
        else:
            model.copies[publisher].clear()
            if what == "clear":
                mirror.apply(publisher, [AllBlocksCleared()])
            elif what == "clear publisher":
                mirror.clear_publisher(publisher)
            else:
                mirror.remove_publisher(publisher)
        for one in PUBLISHERS:
            assert mirror.get_blocks(one) == model.get_blocks(one)
            assert mirror.count_blocks(one) == len(model.copies[one])
        for asked in (None, *MEDIA):
            hashes = [hash_of_prefix(prefix[: end + 1]) for end in range(len(prefix))]
            assert mirror.find_prefix(hashes, medium=asked) == model.find(prefix, asked)
            # A token lookup finds at most as much as a hash lookup, and the same if every parent was known.
            tokens = [token for token in prefix for _ in range(2)]
            by_tokens = mirror.find_prefix_of_tokens(tokens, medium=asked)
            by_hash = model.find(prefix, asked)
            for one in PUBLISHERS:
                assert by_tokens.get(one, 0) <= 2 * by_hash.get(one, 0)
                known = one in mirror.publisher_ids and mirror.get_counts(one).num_unknown_parents == 0
                if known:
                    assert by_tokens.get(one, 0) == 2 * by_hash.get(one, 0)
    for publisher in PUBLISHERS:
        mirror.remove_publisher(publisher)
    assert not any(table.publishers or table.token_publishers for table in mirror._tables.tables.values())
