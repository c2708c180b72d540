"""The agent workload: sessions of user turns, each a loop of model and tool calls, with compaction."""

from collections.abc import Iterator
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
class AgentSettings(WorkloadSettings):
    """The settings of an agent workload. "Measured" is the shared trace `agentic_coding_a`.

    A request there continues an earlier one of its session if it repeats 90 % of its blocks. Tool calls are
    gaps of less than a minute, and user turns the others.

    Attributes:
    """

    max_tokens: int = setting(
        "Maximum length of a prompt. A longer one is compacted: it continues with the system prompt and "
        "a summary. Default: measured, 9 of 10 compactions come before 163,000 tokens.",
        default=160_000,
        min=1,
    )
    sessions_per_s: float = setting(
        "Sessions that start per second, on average. Default: the trace's 80 in two hours.", default=80 / 7200
    )
    system_tokens: Distribution = distribute(
        "Tokens of tool definitions and system prompt. Default: the trace's README, 15,000.",
        default=Distribution("fixed", 15_000),
    )
    task_tokens: Distribution = distribute(
        "Tokens of the first message of a session. Default: measured, median 21,360 with the system "
        "prompt; the deviation is a choice.",
        default=Distribution("lognormal", 6_400, 1.0),
    )
    turns: Distribution = distribute(
        "User turns of a session. Default: measured, mean 57 requests in 6.4 steps per turn.",
        default=Distribution("geometric", 9),
    )
    steps: Distribution = distribute(
        "Requests of a user turn: one, and one per tool call. Default: measured, 15.6 % of the gaps are "
        "a minute or longer.",
        default=Distribution("geometric", 6.4),
    )
    tool_pause: Distribution = distribute(
        "Seconds from a request to the next one of the same user turn: answer and tool call. Default: "
        "measured, mean of the logarithm 2.71, deviation 0.56.",
        default=Distribution("lognormal", 15, 0.56),
    )
    think_time: Distribution = distribute(
        "Seconds from the last request of a user turn to the next user turn. Default: measured, mean of "
        "the logarithm 5.12, deviation 0.88.",
        default=Distribution("lognormal", 167, 0.88),
    )
    tool_tokens: Distribution = distribute(
        "Tokens of a tool's result. Default: measured, mean of the logarithm 5.78, deviation 1.8.",
        default=Distribution("lognormal", 323, 1.8),
    )
    message_tokens: Distribution = distribute(
        "Tokens of a user's later message. Default: measured, mean of the logarithm 6.02, deviation 2.0.",
        default=Distribution("lognormal", 412, 2.0),
    )
    output_tokens: Distribution = distribute(
        "Tokens of an answer. Default: measured, mean of the logarithm 5.53, deviation 0.85.",
        default=Distribution("lognormal", 251, 0.85),
    )
    summary_tokens: Distribution = distribute(
        "Tokens of the summary that replaces a compacted context. Default: measured, median 29,980 with "
        "the system prompt; the deviation is a choice.",
        default=Distribution("lognormal", 15_000, 0.4),
    )


def generate_agent(settings: AgentSettings) -> Iterator[GeneratedRequest]:
    """Yield the requests of an agent workload, in the order of arrival. Raises InvalidArgumentError."""
    settings.check()
    stream = RandomStream(settings.seed)
    system = SystemPrompts(settings, stream)
    return generate_requests(settings, lambda: work(settings, stream, system), stream)


def work(settings: AgentSettings, stream: RandomStream, system: SystemPrompts) -> Session:
    """Yield the requests of a session. Each repeats the context so far, until that is compacted."""
    system_number = system.choose()

    def begin(length: Distribution) -> GrowingPrompt:
        """Return a context of the system prompt and a text of its own, cut to the maximum length."""
        prompt = system.begin(system_number)
        prompt.append_own_within(length.sample_count(stream), settings.max_tokens)
        return prompt

    prompt = begin(settings.task_tokens)
    num_output = settings.output_tokens.sample_count(stream)
    num_turns_left = settings.turns.sample_count(stream) - 1
    num_steps_left = settings.steps.sample_count(stream) - 1
    yield Turn(0.0, prompt, num_output)
    while num_steps_left or num_turns_left:
        if num_steps_left:
            num_steps_left -= 1
            pause_s = settings.tool_pause.sample(stream)
            num_new = settings.tool_tokens.sample_count(stream)
        else:
            num_turns_left -= 1
            num_steps_left = settings.steps.sample_count(stream) - 1
            pause_s = settings.think_time.sample(stream)
            num_new = settings.message_tokens.sample_count(stream)
        num_new += num_output
        if prompt.num_tokens + num_new > settings.max_tokens:
            prompt = begin(settings.summary_tokens)
        else:
            prompt.append_own(num_new)
        num_output = settings.output_tokens.sample_count(stream)
        yield Turn(pause_s, prompt, num_output)
