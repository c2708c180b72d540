"""`GrowingPrompt`: the block ids of a conversation's prompt while the conversation grows."""


class FreshIds:
    """Block ids that no other block has: 0, 1, 2 and so on."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, num_ids: int) -> range:
        """Return the next `num_ids` ids."""
        first, self._next = self._next, self._next + num_ids
        return range(first, self._next)


class GrowingPrompt:
    """A prompt of text that other prompts share, followed by text of its own.

        shared       |  own text                        |
        0    1    2  |   17    18    19   ...           |  one id for each full block
                   ^ a block that ends in own text has an id of its own

    Attributes:
        ids: the ids of its full blocks, head first.
        num_tokens: its length.
    """

    __slots__ = ("_block_size", "_fresh", "ids", "num_tokens")

    def __init__(self, fresh: FreshIds, block_size: int) -> None:
        self._fresh = fresh
        self._block_size = block_size
        self.ids: list[int] = []
        self.num_tokens = 0

    def append_shared(self, num_tokens: int, first_id: int) -> None:
        """Append text that is equal in all prompts with the same text before it.

        Args:
            first_id: id of the first block that ends in this text; the next ones follow it.
        """
        self.num_tokens += num_tokens
        num_new = self.num_tokens // self._block_size - len(self.ids)
        self.ids.extend(range(first_id, first_id + num_new))

    def append_own(self, num_tokens: int) -> None:
        """Append text that no other prompt has."""
        self.num_tokens += num_tokens
        self.ids.extend(self._fresh.take(self.num_tokens // self._block_size - len(self.ids)))

    def append_own_within(self, num_tokens: int, max_tokens: int) -> None:
        """Append as `append_own`, less if the prompt would exceed `max_tokens`, but at least one token."""
        self.append_own(max(1, min(num_tokens, max_tokens - self.num_tokens)))
