"""`SchedulerSchedule`: a random engine over vLLM's scheduler, as plain operations for a `SchedulerSide`.

Requests arrive with shared prefixes and all that changes what is cached or hit: salts, adapters, images,
priorities, prefixes not to be read, external tokens, grammars. Sessions get their input in pieces. The model
runner is a fake with random tokens, accepted drafts and transfers. As in vLLM's engine, with async scheduling
a step is scheduled before the previous one is answered.

Excluded, since no engine does it:

- an answer that reports a failed load of blocks while a later step is in flight
- prompts that leave no room for an output token, and a pool smaller than one request
"""

import random
from dataclasses import dataclass
from itertools import pairwise

from integrations.scheduler_options import NEWEST, make_options

EOS = 1


@dataclass(frozen=True)
class Pace:
    """How many requests arrive and leave: the most at a time, and the probabilities in each step.

    `session` is the probability that a new request gets its input in pieces.
    `watermark` replaces that of the options, if it is not None.
    """

    max_requests: int = 12
    arrival: float = 0.35
    abort: float = 0.03
    reset: float = 0.02
    session: float = 0.04
    watermark: float | None = None


def draw_pace(rng):
    """Return the default pace for half of the engines, and a wilder one for the others."""
    if rng.random() < 0.5:
        return Pace()
    return Pace(
        max_requests=rng.choice([12, 24, 40]),
        arrival=rng.choice([0.35, 0.7, 0.95]),
        abort=rng.choice([0.03, 0.1, 0.3]),
        reset=rng.choice([0.02, 0.1, 0.2]),
        session=rng.choice([0.04, 0.3]),
        watermark=rng.choice([0.0, 0.05, 0.1, 0.1, 0.2, 0.4]),
    )


class SchedulerSchedule:
    def __init__(self, kind, seed, release=NEWEST):
        self.rng = rng = random.Random(f"{kind} {seed}")
        self.options = options = make_options(kind, rng, release)
        self.pace = draw_pace(random.Random(f"pace of {kind} {seed}"))
        if self.pace.watermark is not None:
            options["scheduler"]["watermark"] = self.pace.watermark
        self.connector = options["connector"]
        self.is_async = options["scheduler"]["async_scheduling"]
        self.num_drafts = options["spec"]["num_speculative_tokens"] if options["spec"] else 0
        self.num_requests = 0
        self.living = {}  # request: its tokens so far
        self.sessions = {}  # request that gets its input in pieces: whether it waits for the next
        self.compiling = []
        self.steps = []  # answers of `schedule` that `update` did not follow yet
        self.loading, self.sending = {}, []  # requests, with the loaded blocks of each group
        length = options["max_model_len"]
        self.documents = [self.some_tokens(length) for _ in range(rng.randrange(1, 4))]

    def some_tokens(self, num_tokens):
        return [self.rng.randrange(2, 6) for _ in range(num_tokens)]

    def decide(self, num_steps):
        """Yield operations of `num_steps` steps and of an orderly end. The result of each is sent back in."""
        rng, pace = self.rng, self.pace
        for _ in range(num_steps):
            while len(self.living) < pace.max_requests and rng.random() < pace.arrival:
                yield from self.arrive()
            if self.compiling and rng.random() < 0.3:
                yield ["compile_grammar", self.compiling.pop(0)]
            if self.sessions and rng.random() < 0.2:
                yield from self.stream(rng.choice(list(self.sessions)))
            if self.living and rng.random() < pace.abort:
                yield from self.abort(rng.choice(list(self.living)))
            if rng.random() < pace.reset:
                yield from self.reset()
            yield from self.step()
        yield from self.end()

    # ---- requests ------------------------------------------------------------------------------

    def arrive(self):
        rng, options = self.rng, self.options
        self.num_requests += 1
        name = f"r{self.num_requests}"
        block_size = options["block_size"]
        document = rng.choice(self.documents)
        shared = document[: rng.randrange(len(document) + 1)]
        if rng.random() < 0.5:
            shared = shared[: len(shared) // block_size * block_size]
        num_own = rng.choice([0, 1, rng.randrange(1, 3 * block_size + 1)])
        tokens = (shared + self.some_tokens(num_own))[: options["max_model_len"] - 1] or [2]
        sampling = {"max_tokens": rng.randrange(1, options["max_model_len"] - len(tokens) + 1)}
        if rng.random() < 0.7:
            sampling["max_tokens"] = min(sampling["max_tokens"], rng.randrange(1, 30))
        if rng.random() < 0.1:
            sampling["skip_reading_prefix_cache"] = True
        if rng.random() < 0.1:
            sampling["ignore_eos"] = True
        extra = {}
        has_finer_hits = options["kind"] == "full + mamba, finer hashes"
        if rng.random() < 0.1 and not has_finer_hits:
            extra["kv_cache_report_mode"] = "full"
        if self.connector and rng.random() < 0.6:
            extra["kv_transfer_params"] = self.some_transfer(len(tokens))
        if extra:
            sampling["extra_args"] = extra
        request = {"arrival_time": float(self.num_requests), "priority": rng.randrange(3)}
        if rng.random() < 0.1:
            request["cache_salt"] = rng.choice(["a", "b"])
        if rng.random() < 0.1:
            request["lora"] = rng.randrange(1, 3)
        if rng.random() < 0.05:
            request["is_structured"] = True
            self.compiling.append(name)
        if options["encoder_budget"] and (options["is_encoder_decoder"] or rng.random() < 0.5):
            request["images"] = self.some_images(len(tokens))
        has_session = options["has_sessions"] and "images" not in request
        if rng.random() < self.pace.session and has_session:
            request["resumable"] = True
            self.sessions[name] = False
        self.living[name] = list(tokens)
        yield ["add", name, tokens, sampling, request]

    def some_transfer(self, num_tokens):
        rng, block_size = self.rng, self.options["block_size"]
        num_external = rng.randrange(num_tokens + 1)
        is_aligned = any(group["kind"] == "mamba" for group in self.options["groups"])
        if is_aligned or rng.random() < 0.8:
            num_external -= num_external % block_size
        return {
            "num_external": num_external,
            "num_defers": rng.choice([0, 0, 0, 1, 3]),
            "delay_free": rng.random() < 0.3,
        }

    def some_images(self, num_tokens):
        """Return the positions of images, in order; an encoder-decoder model has one, at the start."""
        rng, budget = self.rng, self.options["encoder_budget"]
        if self.options["is_encoder_decoder"]:
            return [[0, rng.randrange(1, budget + 1), f"sound {rng.randrange(1000)}"]]
        cuts = sorted(rng.sample(range(num_tokens + 1), min(rng.choice([2, 2, 4]), num_tokens + 1)))
        images = []
        for start, end in list(pairwise(cuts))[::2]:
            length = min(end - start, budget)
            images.append([start, length, f"image {length} {rng.randrange(3)}"])
        return images

    def stream(self, name):
        """Send more input to a session, or end it."""
        rng = self.rng
        num_left = self.options["max_model_len"] - len(self.living[name]) - 1
        tokens = []
        if num_left > 1 and rng.random() < 0.7:
            if not self.sessions[name]:
                return
            tokens = self.some_tokens(min(rng.randrange(1, num_left), 3 * self.options["block_size"]))
            self.living[name] += tokens
            self.sessions[name] = False
        else:
            del self.sessions[name]
        exists = yield ["stream", name, tokens, {"max_tokens": rng.randrange(1, 10)}]
        if not exists:
            self.forget(name)

    def forget(self, name):
        tokens = self.living.pop(name)
        self.sessions.pop(name, None)
        if name in self.compiling:
            self.compiling.remove(name)
        if self.rng.random() < 0.3:
            self.documents = [*self.documents[-3:], tokens]

    def abort(self, name):
        yield ["abort", name]
        self.forget(name)

    def reset(self):
        yield ["reset", self.rng.random() < 0.5]

    # ---- steps ---------------------------------------------------------------------------------

    def step(self):
        answer = yield ["schedule"]
        self.note_transfers(answer)
        self.steps.append(answer)
        is_idle = not answer["num_scheduled_tokens"]
        depth = 1 if self.is_async and not is_idle and self.rng.random() < 0.9 else 0
        while len(self.steps) > depth:
            yield from self.update()

    def note_transfers(self, answer):
        for call, name, *details in answer.get("connector", ()):
            if call == "load" and self.connector["is_async"]:
                self.loading[name] = details[2]
            elif call == "send":
                self.sending.append(name)

    def update(self):
        step = self.steps.pop(0)
        sampled = {name: [] for name in step["num_scheduled_tokens"]}
        for name in step["samples"]:
            num_accepted = self.rng.randrange(len(step["scheduled_spec_decode_tokens"].get(name, ())) + 1)
            sampled[name] = self.some_tokens(num_accepted + 1)
            if self.rng.random() < 0.03:
                sampled[name][-1] = EOS
        drafts = {}
        if self.num_drafts and not self.is_async:
            drafts = {name: self.some_tokens(self.rng.randrange(self.num_drafts + 1)) for name in sampled}
        transfers = self.some_transfers(step) if self.connector else None
        answer = yield ["update", sampled, transfers, drafts]
        self.note_transfers(answer)
        for outputs in answer["outputs"].values():
            for output in outputs["outputs"]:
                name = output["request_id"]
                if name in self.living:
                    self.living[name] += output["new_token_ids"]
                    if output["finish_reason"] is None:
                        continue
                    if name in self.sessions and output["finish_reason"] in ("STOP", "LENGTH"):
                        self.sessions[name] = True
                    else:
                        self.forget(name)

    def some_transfers(self, step):
        """Return the transfers that have ended with this step, of which some loads have failed."""
        rng = self.rng
        received = [name for name in self.loading if rng.random() < 0.4]
        failed = [name for name in received if rng.random() < 0.15]
        sent = [name for name in self.sending if rng.random() < 0.4]
        transfers = {"finished_recving": received, "finished_sending": sent}
        if len(self.options["groups"]) > 1:
            transfers["failed_recving"] = failed
        elif not self.steps:
            loads = [self.loading[name] for name in failed]
            if not self.connector["is_async"] and not self.is_async:
                calls = [call for call in step["connector"] if call[0] == "load"]
                loads += [call[3] for call in calls if rng.random() < 0.2]
            lost = [rng.choice(blocks[0]) for blocks in loads if blocks[0]]
            transfers["invalid_block_ids"] = lost
        for name in received:
            del self.loading[name]
        self.sending = [name for name in self.sending if name not in sent]
        return transfers

    def end(self):
        """Abort all requests, and answer steps and transfers until nothing is left."""
        yield ["abort", None]
        self.living, self.sessions = {}, {}
        while self.steps:
            yield from self.update()
        while self.loading or self.sending:
            answer = yield ["schedule"]
            self.note_transfers(answer)
            self.steps.append(answer)
            yield from self.update()
        answer = yield ["schedule"]
        self.steps.append(answer)
        yield from self.update()
