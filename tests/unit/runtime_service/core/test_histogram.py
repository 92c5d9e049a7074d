import math

from hypothesis import given
from hypothesis import strategies as st

from runtime_service.core.histogram import Histogram

BOUNDS = (0.1, 1.0, 10.0)


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    histogram = Histogram(BOUNDS)
    for value in (0.0, 0.1, 0.11, 1.0, 10.0, 10.1):
        histogram.observe(value)
    assert histogram.read().counts == (2, 2, 1, 1)


def test_a_reading_does_not_change() -> None:
    histogram = Histogram(BOUNDS)
    before = histogram.read()
    histogram.observe(5.0)
    assert before.count == 0
    assert histogram.read() is histogram.read()
    assert histogram.read().count == 1


@given(st.lists(st.floats(0, 100, allow_nan=False), max_size=20))
def test_every_bucket_counts_what_is_not_above_its_bound(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    reading = histogram.read()
    assert dict(reading.cumulative()) == {bound: sum(v <= bound for v in values) for bound in (*BOUNDS, math.inf)}
    assert math.isclose(reading.sum, math.fsum(values), abs_tol=1e-9)
