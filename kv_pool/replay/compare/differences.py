"""Lists the differences between a comparison and its repetition: inputs and results."""

from collections.abc import Iterator
from math import isclose

from kv_pool.replay.compare.comparison import Comparison, ComparisonRow

_NOT_COMPARED = ("seconds",)


def list_changed_inputs(old: Comparison, new: Comparison) -> list[str]:
    """Return one sentence for each trace, policy file or version of kv_pool that has changed."""
    changed = []
    for before, after in zip(old.traces, new.traces, strict=True):
        of_old, of_new = before.provenance, after.provenance
        if of_old.trace_sha256 != of_new.trace_sha256:
            changed.append(
                f"the trace {of_new.trace} has changed: its SHA-256 is {of_new.trace_sha256}, was "
                f"{of_old.trace_sha256}"
            )
    versions = [each.traces[0].provenance.kv_pool for each in (old, new)]
    if versions[0] != versions[1]:
        changed.append(f"kv_pool is version {versions[1]}, was {versions[0]}")
    digests = {record.name: record.sha256 for record in old.policies}
    for record in new.policies:
        before_sha256 = digests.get(record.name)
        if before_sha256 != record.sha256:
            changed.append(
                f"the policy {record.name} has changed: its SHA-256 is {record.sha256}, was {before_sha256}"
            )
    return changed


def list_differences(old: Comparison, new: Comparison) -> list[str]:
    """Return one sentence for each row whose results differ in more than their duration."""
    found = []
    for before, after in zip(old.traces, new.traces, strict=True):
        trace = after.provenance.trace
        if len(before.rows) != len(after.rows):
            found.append(f"{trace}: {len(after.rows)} rows, there were {len(before.rows)}")
        for row, was in zip(after.rows, before.rows, strict=False):
            differences = ", ".join(_compare(row, was))
            if differences:
                found.append(f"{trace}, {row.policy} at {row.num_blocks:,} blocks: {differences}")
    return found


def _compare(row: ComparisonRow, was: ComparisonRow) -> Iterator[str]:
    for name in ComparisonRow.__struct_fields__:
        value, before = getattr(row, name), getattr(was, name)
        if name in _NOT_COMPARED or value == before:
            continue
        is_close = isinstance(value, float) and isinstance(before, float)
        if not (is_close and isclose(value, before, abs_tol=1e-9)):
            yield f"{name} is {value}, was {before}"
