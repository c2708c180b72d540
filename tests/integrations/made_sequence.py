"""The least an engine's sequence has: tokens in blocks, and what block manager and scheduler count on it."""


class MadeSequence:
    def __init__(self, token_ids, block_size=4, seq_id=0):
        self.token_ids = list(token_ids)
        self.block_size = block_size
        self.seq_id = seq_id
        self.num_tokens = len(self.token_ids)
        self.block_table = []
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0

    def __len__(self):
        return self.num_tokens

    def append_token(self, token_id):
        self.token_ids.append(token_id)
        self.num_tokens += 1

    @property
    def num_blocks(self):
        return -(-self.num_tokens // self.block_size)

    def block(self, i):
        assert 0 <= i < self.num_blocks
        return self.token_ids[: self.num_tokens][i * self.block_size : (i + 1) * self.block_size]
