"""The RAG workload: questions about retrieved documents, some of which are much more popular than others."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct

import xxhash

from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.workloads.chat import ChatSettings, converse
from kv_pool.lab.workloads.distributions import Distribution, RandomStream, ZipfSampler
from kv_pool.lab.workloads.workload import (
    MAX_TOKENS,
    GeneratedRequest,
    GrowingPrompt,
    SystemPrompts,
    distribute,
    generate_requests,
)
from kv_pool.option import describe_options, setting

_pack = Struct(">QQ").pack
# Ids of documents are in 2**61..2**62-1, so that three such traces can be merged without renumbering.
_SHARED = 1 << 61
_NUM_FIRST_IDS = (1 << 61) - MAX_TOKENS
_MASK = (1 << 64) - 1


@describe_options
@dataclass(frozen=True, kw_only=True)
class RAGSettings(ChatSettings):
    """The settings of a RAG workload.

    A prompt is the system prompt, the documents in the order of retrieval, and the question. Two prompts
    share a document's blocks only if all documents before it are equal, too. Later turns of a conversation
    repeat the prompt and retrieve nothing.

    Attributes:
    """

    sessions_per_s: float = setting(
        "Conversations that start per second, on average. Default: a choice.", default=1.0
    )
    system_tokens: Distribution = distribute(
        "Tokens of a system prompt. Default: a choice.", default=Distribution("fixed", 256)
    )
    documents: int = setting("Number of documents in the corpus. Default: a choice.", default=10_000, min=1)
    document_skew: float = setting(
        "Zipf exponent of the popularity of documents. Default: the most popular 3 % get 60 % of the "
        "retrievals, as in Jin et al., RAGCache, 2024.",
        default=0.96,
        min=0.0,
    )
    retrieved: Distribution = distribute(
        "Documents of a question, all different. Default: a choice, top 2.", default=Distribution("fixed", 2)
    )
    document_tokens: Distribution = distribute(
        "Tokens of a document, drawn once for each. Default: documents add 1,000 tokens or more in "
        "RAGCache; the deviation is a choice.",
        default=Distribution("lognormal", 1_000, 0.5),
    )
    turns: Distribution = distribute(
        "Requests of a conversation. Default: a choice, questions without follow-up.",
        default=Distribution("fixed", 1),
    )
    first_tokens: Distribution = distribute(
        "Tokens of a question. Default: RAGCache's 100; the deviation is a choice.",
        default=Distribution("lognormal", 100, 0.5),
    )

    def check(self) -> None:
        """Raise InvalidArgumentError if a value is out of range."""
        super().check()
        if self.retrieved.kind == "fixed" and self.retrieved.first > self.documents:
            raise InvalidArgumentError(
                f"retrieved is {self.retrieved}, but the corpus has {self.documents} documents"
            )


def generate_rag(settings: RAGSettings) -> Iterator[GeneratedRequest]:
    """Yield the requests of a RAG workload, in the order of arrival. Raises InvalidArgumentError."""
    settings.check()
    stream = RandomStream(settings.seed)
    prompts = _RAGPrompts(settings, stream)
    return generate_requests(settings, lambda: converse(settings, stream, prompts.begin), stream)


class _RAGPrompts:
    """Prompts of the system prompt and of documents, before the question."""

    def __init__(self, settings: RAGSettings, stream: RandomStream) -> None:
        self.settings = settings
        self.stream = stream
        self._system = SystemPrompts(settings, stream)
        self._zipf = ZipfSampler(settings.documents, settings.document_skew)
        drawn = (settings.document_tokens.sample_count(stream) for _ in range(settings.documents))
        self._num_tokens = array("q", (min(length, MAX_TOKENS) for length in drawn))

    def begin(self) -> GrowingPrompt:
        settings = self.settings
        number = self._system.choose()
        prompt = self._system.begin(number)
        place = _hash_place(settings.seed & _MASK, number)
        num_wanted = min(settings.retrieved.sample_count(self.stream, 0), settings.documents)
        for document in self._retrieve(num_wanted):
            num_left = settings.max_tokens - prompt.num_tokens - 1
            num_tokens = self._num_tokens[document]
            if num_tokens > num_left:
                break
            place = _hash_place(place, document)
            prompt.append_shared(num_tokens, _SHARED + place % _NUM_FIRST_IDS)
        return prompt

    def _retrieve(self, num_wanted: int) -> list[int]:
        """Return `num_wanted` different documents, in the order of retrieval."""
        found: dict[int, None] = {}
        num_draws = 0
        while len(found) < num_wanted:
            # Only a large share of a skewed corpus needs this many draws: then take the most popular others.
            if num_draws >= 100 * num_wanted:
                rest = (document for document in range(self.settings.documents) if document not in found)
                found[next(rest)] = None
                continue
            found[self._zipf.take_rank(self.stream)] = None
            num_draws += 1
        return list(found)


def _hash_place(place: int, item: int) -> int:
    """Return the hash of a place in a prompt: of all that comes before an item, and the item.

    The ids of a document's blocks follow from this hash, so that no table of the places seen so far is
    needed. For a million places of 100 blocks, two of them have a common id with a probability of 10**-4.
    """
    return xxhash.xxh3_64_intdigest(_pack(place, item))
