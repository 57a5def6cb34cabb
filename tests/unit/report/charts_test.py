import pytest

from loka_jax.report import charts
from loka_jax.report.charts import Series
from loka_jax.report.render import flat, number


def points(spark):
    return [[tuple(map(float, p.split(","))) for p in x.split()] for x in spark.lines]


def test_a_scale_that_halves_falls_by_an_equal_step():
    (line,) = points(charts.sparkline([2.0**-k for k in range(9)]))
    assert [y for _, y in line] == pytest.approx([3 + 3 * k for k in range(9)])


def test_a_scale_without_value_leaves_a_gap():
    spark = charts.sparkline([1.0, 2.0, None, 0.0, 4.0, 2.0])
    assert [len(line) for line in points(spark)] == [2, 2]
    assert charts.sparkline([None, 0.0, -1.0]) is None


def test_a_chart_without_points_is_left_out():
    series = [Series("x", [(1.0, None)], "accent")]
    assert charts.curves("AUC", series) == []
    assert charts.scatter("Error", series, "x", "y") == []


def test_the_limits_leave_out_the_first_steps_of_a_run():
    ys = [10.0] * 5 + [1.0] * 95 + [0.5]
    series = Series("x", [(float(x), y) for x, y in enumerate(ys)], "accent")
    low, high = charts.limits([series], 0.4)
    assert low < 0.4 and 1.0 < high < 1.1


def test_nested_values_are_shown_by_dotted_name():
    value = {"a": {"b": [1, 2], "c": {}}, "d": None}
    assert flat(value) == {"a.b": "1 2", "a.c": {}, "d": None}


@pytest.mark.parametrize(
    "value, spec, expected",
    [
        (1234.5, ",.0f", "1,234"),
        (0.12345, ".2%", "12.35 %"),
        (float("nan"), ".2%", "n/a"),
        (True, ",.0f", "n/a"),
        ("1", ",.0f", "n/a"),
        (None, ",.0f", "n/a"),
    ],
)
def test_numbers(value, spec, expected):
    assert number(value, spec) == expected
