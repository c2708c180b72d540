"""Generated workloads: reproducible, prefix-closed, of bounded memory, with the stated distributions."""

import dataclasses
import hashlib
import math
import statistics
import tracemalloc
from collections import Counter
from itertools import islice, pairwise

import msgspec
import pytest

from kv_pool import InvalidArgumentError
from kv_pool.lab.workloads import rag
from kv_pool.lab.workloads.agent import AgentSettings, generate_agent
from kv_pool.lab.workloads.chat import ChatSettings, generate_chat
from kv_pool.lab.workloads.distributions import Distribution
from kv_pool.lab.workloads.rag import RAGSettings, generate_rag
from kv_pool.option import list_options

KINDS = {
    "chat": (generate_chat, ChatSettings),
    "agent": (generate_agent, AgentSettings),
    "rag": (generate_rag, RAGSettings),
}
DIGESTS = {
    "chat": "53d44c895a014b98f0b5421828a68f3194b65b20e915a0ff74fbcc20108faed9",
    "agent": "38dd8e928188d53ff2beb8ba1e9e5bfaa211b35bb66e1b96eadddd5fd976b8f1",
    "rag": "dfe7514d626804d1aece5ccafaafe37e9590df17d992124a739faa6daadbbb79",
}


def generate(kind, num_requests, **options):
    make, settings_class = KINDS[kind]
    return list(make(settings_class(num_requests=num_requests, **options)))


def fixed(value):
    return Distribution("fixed", value)


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_gives_the_same_bytes_on_every_platform(kind):
    """The digests were computed once, on x86-64 with CPython 3.11."""
    data = b"\n".join(map(msgspec.json.encode, generate(kind, 500, seed=7)))
    assert hashlib.sha256(data).hexdigest() == DIGESTS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_differ_and_shorter_traces_are_beginnings(kind):
    assert generate(kind, 50, seed=1) != generate(kind, 50, seed=2)
    assert generate(kind, 50, seed=1) == generate(kind, 200, seed=1)[:50]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 16, 1000])
def test_requests_are_ordered_and_have_full_blocks_only(kind, block_size):
    requests = generate(kind, 100, seed=3, block_size=block_size, max_tokens=5000, system_tokens=fixed(70))
    assert [one.timestamp for one in requests] == sorted(one.timestamp for one in requests)
    for one in requests:
        assert 1 <= one.input_length <= 5000
        assert one.output_length >= 1
        assert len(one.hash_ids) == one.input_length // block_size
        assert len(set(one.hash_ids)) == len(one.hash_ids)
        assert all(0 <= hash_id < 2**64 for hash_id in one.hash_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_always_has_the_same_prefix(kind):
    before = {}
    options = {"documents": 12} if kind == "rag" else {}
    for one in generate(kind, 400, seed=4, system_prompts=3, max_tokens=20_000, **options):
        for position, (parent, hash_id) in enumerate(pairwise([None, *one.hash_ids])):
            assert before.setdefault(hash_id, (position, parent)) == (position, parent)


class TokenModel:
    """A slow model of prompts: lists of tokens, whose blocks are equal if all tokens up to their end are."""

    def __init__(self, block_size):
        self.block_size = block_size
        self.ids = {}

    def number_blocks(self, tokens):
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return [self.ids.setdefault(tuple(tokens[:end]), len(self.ids)) for end in ends]


def test_documents_are_shared_as_their_tokens_are(monkeypatch):
    """Prompts of known documents share exactly the blocks whose tokens, and all before, are equal."""
    retrieved = []
    original = rag._RAGPrompts._retrieve

    def retrieve(workload, num_wanted):
        retrieved.append((original(workload, num_wanted), list(workload._num_tokens)))
        return retrieved[-1][0]

    monkeypatch.setattr(rag._RAGPrompts, "_retrieve", retrieve)
    requests = generate(
        "rag",
        300,
        seed=5,
        block_size=8,
        documents=5,
        retrieved=Distribution("uniform", 0, 4),
        document_tokens=Distribution("uniform", 3, 40),
        system_tokens=fixed(20),
        first_tokens=Distribution("uniform", 1, 20),
    )
    model = TokenModel(8)
    same = {}
    for number, (one, (documents, lengths)) in enumerate(zip(requests, retrieved, strict=True)):
        tokens = ["system"] * 20
        for document in documents:
            tokens += [("document", document, place) for place in range(lengths[document])]
        tokens += [("question", number)] * (one.input_length - len(tokens))
        expected = model.number_blocks(tokens)
        for found, modelled in zip(one.hash_ids, expected, strict=True):
            assert same.setdefault(found, modelled) == modelled
    assert len(set(same.values())) == len(same)
    assert len(requests) == len(retrieved)


@pytest.mark.parametrize("kind", ["chat", "agent"])
def test_next_turn_repeats_the_prompt(kind):
    last = {}
    num_repeated = num_compacted = 0
    for one in generate(kind, 2000, seed=6):
        earlier = last.get(one.session_id)
        if earlier is not None:
            if one.hash_ids[: len(earlier.hash_ids)] == earlier.hash_ids:
                num_repeated += 1
                assert one.input_length > earlier.input_length + earlier.output_length
            else:
                num_compacted += 1
                assert one.hash_ids[: 768 // 64] == earlier.hash_ids[: 768 // 64]
        last[one.session_id] = one
    assert num_repeated > 500
    assert (num_compacted > 0) == (kind == "agent")


@pytest.mark.slow
def test_memory_is_that_of_living_sessions():
    make, settings_class = KINDS["chat"]
    settings = settings_class(num_requests=30_000, think_time=fixed(5), first_tokens=fixed(500))
    requests = make(settings)
    peaks = []
    tracemalloc.start()
    for _ in range(3):
        list_length = sum(1 for _ in islice(requests, 10_000))
        peaks.append(tracemalloc.get_traced_memory()[0])
        assert list_length == 10_000
    tracemalloc.stop()
    assert peaks[2] < 1.5 * peaks[0]
    assert peaks[2] < 5e6


# ---- statistics --------------------------------------------------------------------------------


def test_sessions_arrive_as_a_poisson_process():
    requests = generate("rag", 5000, seed=8, sessions_per_s=4.0)
    gaps = [(later.timestamp - one.timestamp) / 1000 for one, later in pairwise(requests)]
    assert abs(statistics.mean(gaps) - 0.25) < 4 * 0.25 / math.sqrt(5000)
    # The share of seconds without an arrival is e**-4.
    seconds = Counter(one.timestamp // 1000 for one in requests)
    num_seconds = requests[-1].timestamp // 1000
    empty = sum(second not in seconds for second in range(num_seconds)) / num_seconds
    assert abs(empty - math.exp(-4)) < 4 * math.sqrt(math.exp(-4) / num_seconds)


# ---- limits ------------------------------------------------------------------------------------


def test_whole_corpus_can_be_retrieved():
    requests = generate("rag", 20, documents=5, document_skew=9.0, retrieved=fixed(5), block_size=1)
    assert len({one.hash_ids[-1] for one in requests}) == 20


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("chat", {"num_requests": 0}, "num_requests is 0; it must be 1 or more"),
        ("chat", {"block_size": 0}, "block_size is 0"),
        ("chat", {"sessions_per_s": 0.0}, "sessions_per_s is 0.0; it must be above 0"),
        ("chat", {"sessions_per_s": math.inf}, "sessions_per_s is inf"),
        ("chat", {"arrival_shape": 0.0}, "arrival_shape is 0.0; it must be in 0.1..10"),
        ("chat", {"sessions_per_s": math.nan}, "sessions_per_s is nan"),
        ("agent", {"max_tokens": 10**9}, "max_tokens is 1,000,000,000; it must be at most 16,000,000"),
        ("agent", {"system_prompts": 0}, "system_prompts is 0"),
        ("agent", {"system_skew": -1.0}, "system_skew is -1.0"),
        ("rag", {"documents": 0}, "documents is 0"),
        ("rag", {"documents": 3, "retrieved": fixed(4)}, "retrieved is fixed:4, but the corpus has 3"),
        ("rag", {"document_skew": math.nan}, "document_skew is nan"),
    ],
)
def test_invalid_settings_are_refused(kind, options, message):
    make, settings_class = KINDS[kind]
    with pytest.raises(InvalidArgumentError) as caught:
        make(settings_class(**{"num_requests": 1, **options}))
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_has_an_option(kind):
    settings_class = KINDS[kind][1]
    names = {name for name, _, _ in list_options(settings_class)}
    assert names == {field.name for field in dataclasses.fields(settings_class)}
