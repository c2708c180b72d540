"""Commands offer the options that settings declare, and create settings from their values."""

import inspect
from dataclasses import dataclass, field
from typing import Annotated

import pytest

from kv_pool import InvalidArgumentError
from kv_pool.cli.replay import replay, sweep
from kv_pool.cli.serve import serve
from kv_pool.cli.setting_options import takes, takes_given
from kv_pool.cli.sub_commands import make_command
from kv_pool.control.serve_settings import ServeSettings
from kv_pool.lab.settings import EngineRates, ReplaySettings
from kv_pool.option import Option, describe_options, list_options, setting

OWN = setting("Of the command itself.", default=None)


def read_rate(text):
    if not text.endswith("GB"):
        raise InvalidArgumentError(f"{text!r} is not a rate")
    return int(text[:-2]) * 10**9


@dataclass(frozen=True)
class Rates:
    copy_bytes_per_s: Annotated[
        int, Option("A rate.", name="copy_rate", parse=read_rate, show=lambda rate: f"{rate // 10**9}GB")
    ] = 2 * 10**9


@dataclass(frozen=True)
class Settings:
    trace: Annotated[str, Option("A trace.", is_argument=True)]
    num_blocks: int
    limit: Annotated[int | None, Option("A limit.", min=1)] = None
    is_loud: Annotated[bool, Option("Loud.", name="loud")] = False
    rates: Rates = field(default_factory=Rates)


@describe_options
@dataclass
class Described:
    """Something.

    Attributes:
        size: of it.
    """

    size: int = 0
    limit: Annotated[int, Option("At most.")] = 1


def call(order, *, found=(), **given):
    """Return the arguments with which a command that takes `Settings` is called."""
    called = []

    @takes(order, **dict(found))
    def command(settings: Settings, own: str | None = OWN):
        called.append((settings, own))

    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(command).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    command(**{**defaults, **given})
    return called[0]


def offered(command):
    return set(inspect.signature(command).parameters)


def find_command(name):
    return make_command("0", [name]).commands[name]


def names_of(settings_class):
    return {option.name or name for name, _, option in list_options(settings_class)}


def test_settings_are_created_from_options_by_name():
    settings, own = call(
        "trace limit loud copy_rate own",
        found={"num_blocks": 7},
        trace="t",
        limit=3,
        loud=True,
        copy_rate="5GB",
        own="mine",
    )
    assert settings == Settings("t", 7, 3, True, Rates(5 * 10**9))
    assert own == "mine"


def test_absent_options_have_the_defaults_of_the_settings():
    settings, _ = call("trace limit loud copy_rate own", found={"num_blocks": 7}, trace="t")
    assert settings == Settings("t", 7)


def test_an_unreadable_value_is_refused():
    with pytest.raises(InvalidArgumentError, match="'fast' is not a rate"):
        call("trace copy_rate own", found={"num_blocks": 7}, trace="t", copy_rate="fast")


def test_help_lists_options_in_the_given_order_and_then_those_of_the_log():
    @takes("own copy_rate trace")
    def command(settings: Settings, own: str | None = OWN):
        raise AssertionError

    assert list(inspect.signature(command).parameters) == [
        *("own", "copy_rate", "trace"),
        *("log_format", "log_level"),
    ]


def test_only_given_options_override_a_file():
    called = []

    @takes_given(ServeSettings, "blocks peer config")
    def command(given, config: str | None = OWN):
        called.append((given, config))

    parameters = inspect.signature(command).parameters
    assert [parameters[name].default for name in ("blocks", "peer", "config")] == [None] * 3
    command(blocks=5, peer=None, config="file")
    assert called == [({"blocks": 5, "peer": None}, "file")]


def test_every_option_of_the_settings_is_offered():
    assert names_of(ReplaySettings) | names_of(EngineRates) <= offered(replay)
    assert names_of(ServeSettings) <= offered(serve)
    assert offered(sweep) - offered(replay) == {"overlay", "jobs"}


def test_the_help_of_options_documents_the_fields():
    assert inspect.getdoc(Described) == "Something.\n\nAttributes:\n    size: of it.\n    limit: At most."


def test_help_shows_the_least_value_of_a_count():
    shown = {each.name: each.metavar for each in find_command("replay").params}
    assert (shown["limit"], shown["host_tier"]) == ("N>=1", "BLOCKS>=0")


@pytest.mark.parametrize(
    ("command", "words", "wanted"),
    [
        ("replay", "--limit 1k --block-size 1_024", {"limit": 1000, "block_size": 1024}),
        ("serve", "--blocks 20k --block-bytes 4KiB", {"blocks": 20_000, "block_bytes": "4KiB"}),
        ("compare", "--resamples 10k --jobs 1k", {"resamples": 10_000, "jobs": 1000}),
        ("defrag", "--max-moves 1k --max-evictions 2k", {"max_moves": 1000, "max_evictions": 2000}),
        ("events", "--limit 2k", {"limit": 2000}),
        ("migration-status", "--limit 2k", {"limit": 2000}),
    ],
)
def test_counts_and_sizes_may_have_units(command, words, wanted):
    found = find_command(command).make_context(command, words.split(), resilient_parsing=True).params
    assert {name: found[name] for name in wanted} == wanted


def test_sizes_of_a_served_pool_are_read():
    called = []
    takes_given(ServeSettings, "block_bytes blocks")(called.append)(block_bytes="4KiB", blocks=3)
    assert called == [{"block_bytes": 4096, "blocks": 3}]


@pytest.mark.parametrize(
    ("command", "option", "typed", "offered"),
    [
        ("replay", "policy", "s3", ["s3fifo"]),
        ("replay", "clock", "", ["instant", "trace"]),
        ("sweep", "trace", "moon", ["mooncake_conversation"]),
        ("plan", "model", "deep", ["deepseek-v3"]),
        ("compare", "policies", "lru,si", ["lru,sieve"]),
    ],
)
def test_completion_offers_values(command, option, typed, offered):
    found = find_command(command)
    (parameter,) = (each for each in found.params if each.name == option)
    context = found.make_context(command, [], resilient_parsing=True)
    assert [one.value for one in parameter.shell_complete(context, typed)] == offered
