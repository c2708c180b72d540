"""The chat workload: conversations of turns, each of which repeats the conversation before it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kv_pool.lab.workloads.distributions import Distribution, RandomStream
from kv_pool.lab.workloads.workload import (
    GeneratedRequest,
    GrowingPrompt,
    Session,
    SystemPrompts,
    Turn,
    WorkloadSettings,
    distribute,
    generate_requests,
)
from kv_pool.option import describe_options, setting


@describe_options
@dataclass(frozen=True, kw_only=True)
class ChatSettings(WorkloadSettings):
    """The settings of a chat workload. "Measured" is the shared trace `mooncake_conversation`.

    A conversation's next turn is there a request that continues all full blocks of an earlier one.

    Attributes:
    """

    sessions_per_s: float = setting(
        "Conversations that start per second, on average. Default: measured, 3.4 requests per "
        "second, divided by 2.5 turns.",
        default=1.36,
    )
    system_tokens: Distribution = distribute(
        "Tokens of a system prompt. Default: measured, 512 to 900 tokens that all requests share.",
        default=Distribution("fixed", 768),
    )
    turns: Distribution = distribute(
        "Requests of a conversation. Default: mean 2.54 in WildChat (Zhao et al., ICLR 2024: 2,639,415 "
        "turns of 1,039,785 conversations).",
        default=Distribution("geometric", 2.5),
    )
    think_time: Distribution = distribute(
        "Seconds from one turn's arrival to the next. Default: measured, median 126, mean of the "
        "logarithm 4.88, deviation 0.98; 80 % within 10 minutes also in Wang et al., ATC 2025, trace A.",
        default=Distribution("lognormal", 126, 1.0),
    )
    first_tokens: Distribution = distribute(
        "Tokens of a conversation's first message, with pasted text and files. Default: measured, median "
        "5,933 with the system prompt, deviation of the logarithm 1.26.",
        default=Distribution("lognormal", 5200, 1.3),
    )
    message_tokens: Distribution = distribute(
        "Tokens of later messages. Default: measured, growth of the prompt without the last answer, mean "
        "of the logarithm 4.53, deviation 2.45.",
        default=Distribution("lognormal", 93, 2.4),
    )
    output_tokens: Distribution = distribute(
        "Tokens of an answer. Default: measured, mean 343; exponential as in Xiang et al., ServeGen, 2025.",
        default=Distribution("exponential", 343),
    )


def generate_chat(settings: ChatSettings) -> Iterator[GeneratedRequest]:
    """Yield the requests of a chat workload, in the order of arrival. Raises InvalidArgumentError."""
    settings.check()
    stream = RandomStream(settings.seed)
    system = SystemPrompts(settings, stream)
    return generate_requests(
        settings, lambda: converse(settings, stream, lambda: system.begin(system.choose())), stream
    )


def converse(settings: ChatSettings, stream: RandomStream, begin: Callable[[], GrowingPrompt]) -> Session:
    """Yield the requests of a conversation: each prompt is the last one, its answer, and a new message.

    Args:
        begin: returns what comes before the first message.
    """
    prompt = begin()
    prompt.append_own_within(settings.first_tokens.sample_count(stream), settings.max_tokens)
    num_output = settings.output_tokens.sample_count(stream)
    num_turns = settings.turns.sample_count(stream)
    yield Turn(0.0, prompt, num_output)
    for _ in range(num_turns - 1):
        pause_s = settings.think_time.sample(stream)
        num_new = num_output + settings.message_tokens.sample_count(stream)
        if prompt.num_tokens + num_new > settings.max_tokens:
            return
        prompt.append_own(num_new)
        num_output = settings.output_tokens.sample_count(stream)
        yield Turn(pause_s, prompt, num_output)
