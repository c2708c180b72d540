"""Tests that the JSON schemas in the package match the files that are written and read."""

import json
import random
from importlib import resources
from typing import get_type_hints

import jsonschema
import msgspec
import pytest
from lab.made_trace import make_random_records, record, write_trace

from kv_pool import TraceError
from kv_pool.lab import report
from kv_pool.lab.compare import comparison
from kv_pool.lab.curves import curve_report
from kv_pool.lab.plan import plan_report
from kv_pool.lab.report import write_json
from kv_pool.lab.request_outcomes import RequestOutcome, write_outcomes
from kv_pool.lab.settings import EngineRates, ReplaySettings
from kv_pool.lab.simulator import run_replay
from kv_pool.lab.sweep import run_sweep
from kv_pool.lab.trace import Trace


def validator(name):
    text = (resources.files("kv_pool.lab") / "schemas" / f"{name}.schema.json").read_text()
    schema = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture
def trace(tmp_path):
    records = make_random_records(random.Random(11), 100, 8, partial_ids=True)
    return str(write_trace(tmp_path / "trace.jsonl", [*records, "broken"]))


SETTINGS = {
    "instant": {"num_blocks": 6},
    "trace clock with a host pool": {
        "clock": "trace",
        "rates": EngineRates(1000.0, 20.0),
        "host_blocks": 30,
        "block_bytes": 64,
        "limit": 90,
    },
    "tiers": {"num_blocks": 8, "host_tier": 4, "disk_tier": 50},
    "breakdowns": {"by": "session,turn,tenant,minute,position"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_report_and_outcomes_match_their_schemas(trace, tmp_path, name):
    path, lines = tmp_path / "report.json", tmp_path / "requests.jsonl"
    options = {"num_blocks": 14, "trace_block_size": 8, "skip_broken": True, **SETTINGS[name]}
    with write_outcomes(str(lines)) as write:
        write_json(run_replay(ReplaySettings(trace, **options), on_outcome=write), str(path))
    validator("report").validate(json.loads(path.read_text()))
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(found) >= 90
    for line in found:
        validator("request").validate(line)


def test_sweep_reports_match_the_schema(trace, tmp_path):
    path = tmp_path / "sweep.json"
    settings = ReplaySettings(trace, 1, trace_block_size=8, skip_broken=True)
    write_json(run_sweep(settings, [6, 60], 1), str(path))
    reports = json.loads(path.read_text())
    validator("report").validate(reports)
    assert reports[0]["infinite_cache"]["tokens_hit"] > 0


def test_schema_rejects_invalid_reports(trace):
    found = json.loads(
        msgspec.json.encode(run_replay(ReplaySettings(trace, 9, trace_block_size=8, limit=50)))
    )
    validator("report").validate(found)
    for change in (
        {"more": 1},
        {"requests": "1"},
        {"token_hit_rate": 1.5},
        {"clock": "wall"},
        {"tiers": None},
    ):
        assert not validator("report").is_valid(found | change), change
    del found["requests"]
    assert not validator("report").is_valid(found)


SCHEMAS = {"report": report, "curve": curve_report, "compare": comparison, "plan": plan_report}
"""Per schema, the module of the structs of its parts."""

STRUCTS = {"Report": "ReplayReport", "Plan": "CapacityPlan"}
"""Names of structs that are not those of their parts, or with "Plan" in front."""


def find_struct(module, part):
    name = part.title().replace("_", "")
    found = getattr(module, STRUCTS.get(name, name), None)
    return found or getattr(module, f"Plan{name}")


NEW_FIELDS = {"commit"}
"""Files of earlier versions do not have them, and are still right."""


def check_shape(shape, struct):
    names = list(shape["properties"])
    assert names == list(get_type_hints(struct))
    assert shape["required"] == [name for name in names if name not in NEW_FIELDS]
    assert all(field.get("description") for field in shape["properties"].values())


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_field_is_required_and_has_a_description(name):
    parts = validator(name).schema["$defs"]
    for part, shape in parts.items():
        check_shape(shape, find_struct(SCHEMAS[name], part))
    check_shape(validator("request").schema, RequestOutcome)


def test_bundled_trace_matches_the_schema():
    import gzip

    lines = gzip.decompress(Trace("mooncake_conversation").path.read_bytes()).splitlines()
    for line in lines[::100]:
        validator("trace_line").validate(json.loads(line))


@pytest.mark.parametrize(
    ("line", "is_right"),
    [
        (record(600, [1, 2], 3, 4, session_id=["a"], more={}), True),
        ({"token_ids": [1, 2**64 - 1]}, True),
        ({"prompt_token_ids": [1], "timestamp": 1.5}, True),
        ({"token_ids": [1], "hash_ids": None}, True),
        ({"token_ids": [1], "timestamp": None, "input_length": None, "output_length": None}, True),
        ({"token_ids": [1], "timestamp": 1e17, "output_length": 10**9}, True),
        ({"token_ids": [1], "timestamp": 1e308}, False),
        ({"token_ids": [1], "output_length": 2**64}, False),
        (record(2**64, [1, 2]), False),
        ({"hash_ids": [1]}, False),
        ({"input_length": 3}, False),
        ({"token_ids": []}, False),
        ({"token_ids": [-1]}, False),
        ({"token_ids": [2**64]}, False),
        (record(0, []), False),
        (record(600, [1, 2], -1), False),
        (record(600, [1, 2], 0, -1), False),
        (record(600, ["1", 2]), False),
    ],
)
def test_reader_and_schema_accept_the_same_lines(tmp_path, line, is_right):
    path = write_trace(tmp_path / "trace.jsonl", [line])
    assert validator("trace_line").is_valid(line) == is_right
    if is_right:
        assert len(list(Trace(path, block_size=512))) == 1
    else:
        with pytest.raises(TraceError):
            list(Trace(path, block_size=512))
