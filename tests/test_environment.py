"""The table of environment variables, in code, help, `kv-pool info` and the guide; mistakes are found."""

import re
from pathlib import Path

import pytest
from cli.kv_pool_command import kv_pool_command

from kv_pool import environment
from kv_pool.environment import VARIABLES, list_mistakes

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kv_pool"
TABLE = PACKAGE / "environment.py"
NAMES = {variable.name for variable in VARIABLES}
CONSTANTS = {
    value: name for name, value in vars(environment).items() if isinstance(value, str) and value in NAMES
}
SOURCES = {
    path: path.read_text()
    for folder in (PACKAGE, ROOT / ".build")
    for path in folder.rglob("*")
    if path.suffix in (".py", ".md") and path != TABLE
}
PLUGIN = {"VLLM_PLUGINS": "kv_pool"}


def test_every_variable_that_code_or_guides_name_is_in_the_table():
    named = {name for text in SOURCES.values() for name in re.findall(r"\bKV_POOL_[A-Z_]*[A-Z]\b", text)}
    named |= set(re.findall(r"\bKV_POOL_[A-Z_]*[A-Z]\b", (ROOT / "README.md").read_text()))
    assert named - NAMES == set()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_variable_of_the_table_is_read(name):
    readers = [
        path
        for path, text in SOURCES.items()
        if path.suffix == ".py" and re.search(rf"\b{CONSTANTS[name]}\b|environ\S*{name}\b", text)
    ]
    assert readers


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_the_guide_has_each_row_of_the_table(variable):
    guide = (PACKAGE / "integrations" / "README.md").read_text()
    assert f"| `{variable.name}` | {variable.values} | {variable.meaning} |" in guide


def test_info_and_help_show_the_table(tmp_path):
    shown = kv_pool_command("info", cwd=tmp_path, KV_POOL_VLLM_POLICY="s3fifo").stdout
    helped = kv_pool_command("--help", cwd=tmp_path).stdout
    for variable in VARIABLES:
        assert re.search(
            rf"│ {variable.name} +│ .*│ {re.escape(variable.values)} +│ {re.escape(variable.meaning)} +│",
            shown,
        )
        assert f"{variable.name}={variable.values}: {variable.meaning}" in " ".join(helped.split())
    assert re.search(r"│ KV_POOL_VLLM_POLICY +│ s3fifo", shown)


@pytest.mark.parametrize(
    ("environ", "mistakes"),
    [
        ({}, []),
        (PLUGIN, []),
        ({"KV_POOL_VLLM": ""}, []),
        ({"KV_POOL_BUILD": "plain"}, []),
        (PLUGIN | {"KV_POOL_VLLM": "manager", "KV_POOL_VLLM_STATES": "bounded"}, []),
        (PLUGIN | {"KV_POOL_VLLM_CONTROL": "/run/here.sock", "KV_POOL_VLLM_POLICY": "mine:Mine"}, []),
        (
            {"KV_POOL_VLLM": "manager", "KV_POOL_VLLM_CONTROL": "1"},
            [
                "KV_POOL_VLLM, KV_POOL_VLLM_CONTROL needs kv_pool's plugin, and VLLM_PLUGINS is not set; "
                "set VLLM_PLUGINS=kv_pool"
            ],
        ),
        (PLUGIN | {"KV_POOL_VLLM_FORCE": "on"}, ["KV_POOL_VLLM_FORCE is 'on'; it is one of 0, 1"]),
        (
            PLUGIN | {"KV_POOL_VLLM_STATES": "bounded"},
            ["KV_POOL_VLLM_STATES has no effect at level pool; set KV_POOL_VLLM=manager"],
        ),
    ],
)
def test_mistakes_are_listed(environ, mistakes):
    assert list_mistakes(environ) == mistakes
