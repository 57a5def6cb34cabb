"""Sentinels among the features: delayed scales keep what the other values hold."""

import numpy as np

from loka_jax.data import DataConfig
from loka_jax.models import Dlrm
from loka_jax.optim import OptimConfig
from loka_jax.train.config import DlrmConfig, EmbeddingConfig, LoopConfig, RunOptions
from tests.support.train import summary, train

DELAYED = "fp8_tensorwise_delayed_bf16_drhs"
SENTINEL = 999_999


def write_table(path, rows, *, seed, sentinels=0):
    """Writes clicks that depend on three dense columns and a categorical one."""
    draw = np.random.default_rng(seed)
    x, c = draw.normal(size=(rows, 3)), draw.integers(0, 8, rows)
    logit = x @ [1.0, -1.5, 0.7] + 0.4 * (c - 4)
    label = draw.random(rows) < 1 / (1 + np.exp(-logit))
    x[draw.choice(rows, sentinels, replace=False), 0] = SENTINEL
    table = np.column_stack([label, x, c])
    formats = ["%d", "%.4f", "%.4f", "%.4f", "%d"]
    np.savetxt(path, table, formats, ",", header="label,x0,x1,x2,c", comments="")


def trained(tmp_path, recipe, *, sentinels):
    """Returns the AUC on clean rows, and warnings, after training with sentinels."""
    name = f"{recipe}-{sentinels}"
    write_table(tmp_path / f"{name}.csv", 4096, seed=0, sentinels=sentinels)
    write_table(tmp_path / "valid.csv", 4096, seed=1)
    config = DlrmConfig(
        name="sentinels",
        model=Dlrm(bottom_mlp=(32,), top_mlp=(32,), recipe=recipe),
        data=DataConfig(
            kind="table",
            path=str(tmp_path / f"{name}.csv"),
            valid=str(tmp_path / "valid.csv"),
            dense=("x0", "x1", "x2"),
            categorical=("c",),
            transform="none",
            cache=str(tmp_path / "cache"),
        ),
        embedding=EmbeddingConfig(dim=16),
        optim=OptimConfig(lr=3e-3, rows="adam", rows_lr=3e-3, clip_norm=10.0),
        loop=LoopConfig(batch_size=64, epochs=2, log_every=16),
        run=RunOptions(workdir=tmp_path / name),
    )
    code, _ = train(config)
    assert code == 0
    found = summary(tmp_path / name)
    return found["final_eval"]["auc"], " ".join(found["warnings"])


def test_delayed_scales_withstand_sentinels(tmp_path):
    # One batch in seven has one: the window of 16 steps is hardly ever free of them.
    reference, warnings = trained(tmp_path, "bf16", sentinels=0)
    assert reference > 0.8 and not warnings
    auc, warnings = trained(tmp_path, DELAYED, sentinels=9)
    assert auc > reference - 0.01 and "999999 in column 'x0'" in warnings
