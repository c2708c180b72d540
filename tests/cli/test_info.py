"""`kv-pool info`: versions, and whether the core is compiled."""

import json
import platform

from cli.kv_pool_command import kv_pool_command

import kv_pool


def test_info_as_json_equals_the_table(tmp_path):
    found = json.loads(kv_pool_command("info", "--json", cwd=tmp_path).stdout)
    assert found["kv_pool"] == kv_pool.__version__
    assert found["core"] == ("compiled (mypyc)" if kv_pool.COMPILED else "plain Python")
    assert found["packages"]["msgspec"][0].isdigit()


def test_info_shows_the_core_and_versions(tmp_path):
    done = kv_pool_command("info", cwd=tmp_path)
    assert done.returncode == 0
    cells = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    table = {line[1].strip(): line[2].strip() for line in cells}
    assert table["core"] == ("compiled (mypyc)" if kv_pool.COMPILED else "plain Python")
    assert table["kv_pool"] == kv_pool.__version__
    assert table["Python"].endswith(platform.python_version())
    assert table["msgspec"][0].isdigit()
