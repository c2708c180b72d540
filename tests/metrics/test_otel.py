"""Pools as instruments of OpenTelemetry's SDK."""

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum

from kv_pool import BlockAllocationRequest, GPUKVPool
from kv_pool.errors import ControlError
from kv_pool.metrics.otel import observe_pools
from kv_pool.reports import PoolSources


def test_the_metrics_of_kv_pool_are_observed_with_units_and_attributes():
    pool = GPUKVPool(20, 4)
    pool.allocate(BlockAllocationRequest(num_blocks=3, sequence_id=1))
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe_pools(provider.get_meter("kv_pool"), [PoolSources(pool=pool, model_name="m")])
    [resource] = reader.get_metrics_data().resource_metrics
    found = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
    provider.shutdown()

    blocks = found["kv_pool.blocks"]
    assert blocks.unit == "{block}"
    values = {point.attributes["kv_pool.state"]: point.value for point in blocks.data.data_points}
    assert values == {"used": 3, "cached": 0, "empty": 17}
    assert found["kv_pool.fragmentation"].unit == "1"
    calls = found["kv_pool.call.count"].data
    assert isinstance(calls, Sum)
    assert calls.is_monotonic
    assert {point.attributes["kv_pool.call"]: point.value for point in calls.data_points} == {
        "take": 1,
        "free": 0,
        "lookup": 0,
    }
    assert found["kv_pool.call.sum"].unit == "s"
    highest = [
        point
        for point in found["kv_pool.call.bucket"].data.data_points
        if point.attributes["kv_pool.le"] == "+Inf"
    ]
    assert sum(point.value for point in highest) == 1
    assert all(metric.description for metric in found.values())


class LockOfGoneEngine:
    def __enter__(self):
        raise ControlError("the engine is gone")

    def __exit__(self, *raised):
        pass


def test_an_engine_that_is_gone_does_not_hide_the_others():
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    gone = PoolSources(pool=GPUKVPool(20, 4), lock=LockOfGoneEngine(), engine="0")
    observe_pools(provider.get_meter("kv_pool"), [gone, PoolSources(pool=GPUKVPool(20, 4), engine="1")])
    [resource] = reader.get_metrics_data().resource_metrics
    provider.shutdown()
    points = [
        point
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "kv_pool.blocks"
        for point in metric.data.data_points
    ]
    assert {point.attributes["kv_pool.engine"] for point in points} == {"1"}
