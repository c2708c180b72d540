"""`choose_checkpoint`: the second position, besides its end, at which a prompt's states are kept."""

from typing import Final

from mypy_extensions import i64

NO_CHECKPOINT: Final = 0
"""The result for a prompt without a second position: no tokens, so no state."""


def choose_checkpoint(num_hit: i64, num_shared: i64, end: i64, alignment: i64) -> i64:
    """Return the number of tokens after which to keep a state, a multiple of `alignment`; 0 for none.

        tokens  |---- hit ----|---- shared ----|---- new ----|
                0          num_hit        num_shared        end

    The junction of a shared prefix, `num_shared`, if there is no state there: earlier requests had the same
    tokens, so later ones may. Otherwise the middle of the new part of a prompt that is mostly new: if later
    requests share a part of it, more than half of a long shared prefix is hit by the second request already,
    which has the junction's state computed for the third. A prompt that mostly continues a hit keeps no other
    state, since the state of the hit serves requests that diverge later.

    Args:
        num_hit: tokens of the prefix from which all groups can continue.
        num_shared: tokens of the longest prefix that any group has, at least `num_hit`.
        end: tokens up to the prompt's last state, which is kept anyway.
    """
    if num_shared > num_hit:
        junction = num_shared - num_shared % alignment
        return junction if junction > num_hit else NO_CHECKPOINT
    if end - num_hit <= num_hit:
        return NO_CHECKPOINT
    middle = (num_hit + end) // 2
    middle -= middle % alignment
    return middle if middle > num_hit else NO_CHECKPOINT
