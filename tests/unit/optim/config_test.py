import math

import pytest

from loka_jax.optim import OptimConfig


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf])
@pytest.mark.parametrize(
    "name",
    [
        "lr",
        "rows_lr",
        "rows_l2",
        "rows_c",
        "eps",
        "clip_norm",
        "weight_decay",
        "plateau_factor",
    ],
)
def test_a_number_out_of_range_is_refused_by_its_option(name, value):
    with pytest.raises(ValueError, match=f"--optim.{name.replace('_', '-')} "):
        OptimConfig(**{"dense": "adamw", name: value})


@pytest.mark.parametrize("name", ["lr", "rows_lr", "eps", "clip_norm"])
def test_zero_is_refused_where_it_would_stop_training(name):
    with pytest.raises(ValueError, match=f"--optim.{name.replace('_', '-')} 0.0"):
        OptimConfig(**{name: 0.0})


@pytest.mark.parametrize("name, value", [("warmup_steps", -1), ("plateau_patience", 0)])
def test_a_count_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{value} must lie between"):
        OptimConfig(**{name: value})


def test_weight_decay_is_refused_where_it_would_be_ignored():
    with pytest.raises(ValueError, match="needs --optim.dense adamw"):
        OptimConfig(dense="adam", weight_decay=0.1)


@pytest.mark.parametrize(
    "options, option",
    [
        (dict(rows_c=2.0), "--optim.rows-c"),
        (dict(rows_lagged=True), "--optim.rows-lagged"),
    ],
)
def test_settings_of_adagrad_are_refused_where_they_would_be_ignored(options, option):
    with pytest.raises(ValueError, match=f"{option} needs --optim.rows rowwise_ad"):
        OptimConfig(rows="sgd", **options)
