"""The environment variables of kv_pool in one table, and why one that is set has no effect."""

import os
from collections.abc import Mapping
from typing import Final, NamedTuple

LEVEL: Final = "KV_POOL_VLLM"
CONTROL: Final = "KV_POOL_VLLM_CONTROL"
CONTROL_PORT: Final = "KV_POOL_VLLM_CONTROL_PORT"
FORCE: Final = "KV_POOL_VLLM_FORCE"
LIVE_CURVE: Final = "KV_POOL_VLLM_LIVE_CURVE"
MAX_PINNED_BLOCKS: Final = "KV_POOL_VLLM_MAX_PINNED_BLOCKS"
POLICY: Final = "KV_POOL_VLLM_POLICY"
STATES: Final = "KV_POOL_VLLM_STATES"
BUILD: Final = "KV_POOL_BUILD"

LEVELS: Final = ("pool", "manager")


class Variable(NamedTuple):
    """An environment variable.

    Attributes:
        name: its name.
        values: its values for readers; the first one is the default, also if it is empty.
        meaning: what it decides, for readers.
        choices: its values, if these are all; () for any text.
        needs_manager: it has no effect at level `pool`.
    """

    name: str
    values: str
    meaning: str
    choices: tuple[str, ...] = ()
    needs_manager: bool = False


VARIABLES: Final = (
    Variable(
        LEVEL,
        "pool, manager",
        "the classes of vLLM that are replaced: those of the block pool, or of the KV cache manager as well",
        LEVELS,
    ),
    Variable(
        CONTROL,
        "0, 1, a path",
        "open a control socket for kv-pool stats and others: 1 under the name vllm-PID, or at this path",
    ),
    Variable(
        CONTROL_PORT,
        "0, a port",
        "serve the page and /metrics at this port of 127.0.0.1, too; rank N of data parallelism adds N",
    ),
    Variable(POLICY, "lru, a policy", "the cache policy that chooses the blocks to evict"),
    Variable(
        LIVE_CURVE,
        "0, 1",
        "1: estimate the hit rates at other capacities, for kv-pool stats",
        ("0", "1"),
    ),
    Variable(
        MAX_PINNED_BLOCKS,
        "0, a number",
        "the blocks that clients may pin, all together; 0 refuses pins",
        needs_manager=True,
    ),
    Variable(
        STATES,
        "checkpoints, bounded",
        "the states of hybrid models that stay cached: vLLM's, or at most two per request",
        ("checkpoints", "bounded"),
        needs_manager=True,
    ),
    Variable(FORCE, "0, 1", "1: use kv_pool with a vLLM that was not checked, too", ("0", "1")),
    Variable(
        BUILD,
        "auto, compiled, plain",
        "read when kv_pool is installed: compile the core if possible, or fail, or do not compile it",
        ("auto", "compiled", "plain"),
    ),
)
"""All of them. The names that begin with `KV_POOL_VLLM` are read by the plugin of vLLM."""


def explain_plugins(environ: Mapping[str, str] = os.environ) -> str:
    """Return why vLLM does not use kv_pool's plugin, and the way out; "" if `VLLM_PLUGINS` names it."""
    named = environ.get("VLLM_PLUGINS")
    if "kv_pool" in (named or "").split(","):
        return ""
    if not named:
        return "VLLM_PLUGINS is not set; set VLLM_PLUGINS=kv_pool"
    return f"VLLM_PLUGINS is {named!r}; set VLLM_PLUGINS={named},kv_pool"


def find_level(environ: Mapping[str, str] = os.environ) -> str:
    """Return the value of `KV_POOL_VLLM`, or the default. It may be none of `LEVELS`."""
    return environ.get(LEVEL) or LEVELS[0]


def find_control() -> str:
    """Return where an engine opens its control socket: a path, or "1" for the default one; "" for none."""
    return find_value(CONTROL) or ("1" if find_value(CONTROL_PORT) else "")


def find_value(name: str) -> str:
    """Return the value of a variable; "" if it is not set, or 0."""
    found = os.environ.get(name, "")
    return "" if found == "0" else found


def has_level_manager(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if vLLM uses the plugin, and at level `manager`, as far as the variables decide it."""
    return not explain_plugins(environ) and find_level(environ) == "manager"


def list_mistakes(environ: Mapping[str, str] = os.environ, level: str | None = None) -> list[str]:
    """Return a clause for each mistake because of which variables of the vLLM plugin have no effect.

    Args:
        level: the level in use, if it is known; otherwise that of `KV_POOL_VLLM`.
    """
    given = {name: value for name, value in environ.items() if name.startswith(LEVEL) and value}
    why_unused = explain_plugins(environ)
    if given and why_unused:
        return [f"{', '.join(sorted(given))} needs kv_pool's plugin, and {why_unused}"]
    known = {variable.name: variable for variable in VARIABLES}
    level = level or find_level(environ)
    mistakes = []
    for name, value in sorted(given.items()):
        variable = known.get(name)
        if variable is None:
            others = ", ".join(other for other in known if other.startswith(LEVEL))
            mistakes.append(f"kv_pool has no variable {name}; it has {others}")
        elif variable.choices and value not in variable.choices:
            mistakes.append(f"{name} is {value!r}; it is one of {', '.join(variable.choices)}")
        elif variable.needs_manager and level == "pool":
            mistakes.append(f"{name} has no effect at level pool; set {LEVEL}=manager")
    return mistakes
