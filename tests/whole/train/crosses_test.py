"""A table whose label follows pairs of values: the default finds them, and gains."""

import numpy as np
import pyarrow as pa

import loka_jax


def table(rows, seed):
    draw = np.random.default_rng(seed)
    user, item = draw.integers(0, 20, rows), draw.integers(0, 12, rows)
    taste = np.random.default_rng(9).normal(0, 1.5, (20, 12))
    logit = taste[user, item]
    return pa.table(
        {
            "click": (draw.random(rows) < 1 / (1 + np.exp(-logit))).astype(int),
            "user": [f"u{x}" for x in user],
            "item": [f"i{x}" for x in item],
            "noise": [f"n{x}" for x in draw.integers(0, 30, rows)],
        }
    )


def test_the_default_for_tables_finds_crosses(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    test = table(4000, 1)
    settings = {"loop.max_steps": 60, "workdir": tmp_path / "run"}
    run = loka_jax.fit(
        table(12_000, 0),
        label="click",
        test=test,
        settings=settings,
    )
    assert run.summary["config"]["embedding"]["crosses"] == ["user*item=241"]
    found, beside = run.summary["final_eval"]["ne"], run.summary["baseline_ne"]
    assert found <= beside["logistic_regression"] + 1e-3
    assert found < 0.85  # 0.93 by columns apart
    judged = run.evaluate(test)["click"]
    assert abs(judged["ne"] - found) < 1e-6
