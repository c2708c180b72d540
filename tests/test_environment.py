"""The table of environment variables, in help, `kv-pool info` and the guide; mistakes are found."""

import re
from pathlib import Path

import pytest
from cli.kv_pool_command import kv_pool_command

from kv_pool.environment import VARIABLES, list_mistakes

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kv_pool"
PLUGIN = {"VLLM_PLUGINS": "kv_pool"}


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
