import math

import pytest

from loka_jax.optim import OptimConfig

# Values that each option refuses, beside NaN.
OUT_OF_RANGE = {
    **dict.fromkeys(("lr", "rows_lr", "eps", "clip_norm"), (0.0, -1.0, math.inf)),
    **dict.fromkeys(("rows_l2", "rows_c", "weight_decay"), (-1.0, math.inf)),
    "plateau_factor": (-1.0, math.inf),
}


@pytest.mark.parametrize("name, values", OUT_OF_RANGE.items(), ids=str)
def test_a_number_out_of_range_is_refused_by_its_option(name, values):
    for value in (*values, math.nan):
        with pytest.raises(ValueError, match=f"--optim.{name.replace('_', '-')} "):
            OptimConfig(**{"dense": "adamw", name: value})


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(warmup_steps=-1), "-1 must lie between"),
        (dict(plateau_patience=0), "0 must lie between"),
        (dict(task_weights=(1.0, 0.0)), "--optim.task-weights"),
        (dict(task_weights=(1.0, math.nan)), "--optim.task-weights"),
        (dict(task_weights=(1.0, 2e6)), "--optim.task-weights"),
        # What would be ignored.
        (dict(dense="adam", weight_decay=0.1), "needs --optim.dense adamw"),
        (dict(rows="sgd", rows_c=2.0), "--optim.rows-c needs --optim.rows rowwise_ad"),
        (dict(rows="sgd", rows_lagged=True), "--optim.rows-lagged needs --optim.rows"),
    ],
)
def test_other_settings_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        OptimConfig(**options)


def test_limits_themselves_are_served():
    limits = dict(dense="adamw", weight_decay=10.0, eps=1.0, plateau_factor=1.0)
    limits |= dict(plateau_patience=1, lr=1e3, clip_norm=1e-12, task_weights=(1e6,))
    config = OptimConfig(**limits)
    assert {name: getattr(config, name) for name in limits} == limits
