"""Random `kv_pool` objects of requests, valid or not."""

INVALID = [{"priority": 1}, {"change": []}, "{", None, 7, {"session": {"duration_ms": -1}}]


class OptionsDice:
    """Draws objects for prompts of about `num_tokens` tokens, with durations up to `longest_ms`."""

    def __init__(self, rng, num_tokens, longest_ms):
        self.rng = rng
        self.num_tokens = num_tokens
        self.longest_ms = longest_ms

    def draw_range(self, **fields):
        one = dict(fields)
        if self.rng.random() < 0.6:
            one["token_start"] = self.rng.randrange(self.num_tokens)
        if self.rng.random() < 0.7:
            one["token_end"] = one.get("token_start", 0) + self.rng.randrange(1, self.num_tokens)
        return one

    def draw_retention(self):
        rng = self.rng
        if rng.random() < 0.35:
            start = rng.randrange(self.num_tokens // 2)
            quarter = self.num_tokens // 4
            end = start + rng.choice([1, quarter, 2 * quarter, 3 * quarter, 80 * quarter])
            return {"token_start": start, "token_end": end, "duration_ms": self.draw_duration(), "pin": True}
        one = self.draw_range(priority=rng.choice([0, 10, 36, 80, 80, 100]))
        return {**one, "duration_ms": self.draw_duration()} if rng.random() < 0.6 else one

    def draw_duration(self):
        return self.rng.randrange(1, self.longest_ms)

    def draw(self):
        rng = self.rng
        if rng.random() < 0.15:
            return rng.choice(INVALID)
        value = {}
        if rng.random() < 0.6:
            value["token_range_retention_configs"] = [
                self.draw_retention() for _ in range(rng.randrange(1, 3))
            ]
        if rng.random() < 0.2:
            value["decode_retention_priority"] = rng.choice([0, 50])
        if rng.random() < 0.3:
            value["session"] = {"id": rng.choice("ab"), "duration_ms": self.draw_duration()}
        if rng.random() < 0.25:
            value["change"] = [self.draw_retention() for _ in range(rng.randrange(1, 3))]
        for field in ("demote", "release"):
            if rng.random() < 0.15:
                value[field] = rng.choice([True, [self.draw_range()]])
        if rng.random() < 0.15:
            value["end_session"] = rng.choice("ab")
        return value
