"""`kv-pool info`: versions, and whether the core is compiled."""

import json

from cli.kv_pool_command import kv_pool_command

import kv_pool


def test_info_as_json_equals_the_table(tmp_path):
    found = json.loads(kv_pool_command("info", "--json", cwd=tmp_path).stdout)
    assert found["kv_pool"] == kv_pool.__version__
    assert found["core"] == ("compiled (mypyc)" if kv_pool.COMPILED else "plain Python")
    assert found["packages"]["msgspec"][0].isdigit()
