"""What is said of outliers: the operand, the step, the ratio and the column, once."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import scaling
from loka_jax.data import Batch, DataConfig, Position, Schema
from loka_jax.recipe import get_recipe
from loka_jax.train.loop import Loop
from loka_jax.train.watch.scale_watch import LOOK_STEPS, ScaleWatch, take_look
from tests.support import train as support
from tests.support.train import config, lines, summary, train

RECIPE = get_recipe("fp8_tensorwise_delayed")
BATCHES, SIZE = 5, 4  # in an epoch; rows


class Data:
    """Batches of ones but for a value at (epoch, step), in a column of two."""

    schema = Schema(
        label="y", dense=("price", "age"), categorical=("c",), vocab_sizes=(2,)
    )

    num_examples = BATCHES * SIZE

    def __init__(self, values):
        self.values = values

    def num_batches(self, batch_size):
        assert batch_size == SIZE
        return BATCHES

    def batch(self, position, batch_size, *, shuffle):
        assert shuffle
        dense = np.ones((SIZE, 2), np.float32)
        column, value = self.values.get((position.epoch, position.step), (0, 1.0))
        dense[1, column] = value
        return Batch(dense, np.zeros((SIZE, 1), np.int32), dense[:, 0], dense[:, 0])


def look(amaxes, *, g=None, skipped=0, dense=None):
    """Returns a look after steps with these amaxes of lhs and rhs."""
    state = scaling.init_delayed(RECIPE)
    for amax, of_g in zip(amaxes, g or amaxes, strict=True):
        new = jnp.float32([amax, 1.0, of_g])
        state = scaling.update_delayed(state, new, RECIPE)
    step = len(amaxes) + skipped
    return take_look(
        {"mlp/dense_0": state},
        {"mlp/dense_0": RECIPE, "head": get_recipe("f32")},
        jnp.ones((SIZE, 2)) if dense is None else jnp.float32(dense),
        step=step,
        position=Position(step // BATCHES, step % BATCHES, 0),
        skipped=jnp.asarray(skipped),
    )


def warned(*looks, data=None):
    watch = ScaleWatch()
    for one in looks:
        watch = watch.after(one, data or Data({}), SIZE)
    return watch.warnings


def with_outlier(step, steps=16, value=1e5):
    return [value if number == step else 1.0 for number in range(1, steps + 1)]


def test_an_outlier_is_named_with_its_column():
    # Step 12 is batch 1 of epoch 2.
    data = Data({(2, 1): (1, -7e4)})
    (text,) = warned(look(with_outlier(12), g=[1.0] * 16), data=data)
    assert text == (
        "step 12: mlp/dense_0/lhs was clipped at 1/50,000 of its amax; the largest "
        "dense value was -70000 in column 'age'."
    )


@pytest.mark.parametrize("age", range(LOOK_STEPS))
def test_no_step_between_looks_is_missed(age):
    (text,) = warned(look(with_outlier(16 - age)))
    assert text.startswith(f"step {16 - age}: ")


def test_operands_of_one_step_share_a_sentence():
    (text,) = warned(look(with_outlier(12), g=with_outlier(12, value=1e9)))
    assert "mlp/dense_0/g was clipped" in text
    assert "(likewise mlp/dense_0/lhs)" in text


def test_an_operand_and_column_are_named_once():
    data = Data({(2, 1): (0, 1e5), (4, 1): (0, 1e5), (5, 3): (1, 1e5)})
    looks = [look(with_outlier(12)), look(with_outlier(22, 24))]
    assert len(warned(*looks, data=data)) == 1
    texts = warned(*looks, look(with_outlier(29, 32)), data=data)
    assert ["'price'" in texts[0], "'age'" in texts[1]] == [True, True]
    assert len(texts) == 2


@pytest.mark.parametrize(
    "amaxes",
    [
        [1.0] * 16,
        list(0.1 * 2.0 ** np.arange(16)),
        list(1.5 ** -np.arange(16)),
        [0.0] * 12 + [1.0] * 4,
        list(np.exp(np.random.default_rng(0).normal(size=16))),
    ],
    ids=["constant", "growing", "falling", "zeros first", "scattered"],
)
def test_nothing_is_said_of_healthy_amaxes(amaxes):
    assert warned(look(amaxes)) == ()


def test_values_that_a_scale_flushes_are_named():
    texts = warned(look([1e6] * 12 + [1.0] * 4, g=[1.0] * 16))
    (text,) = [text for text in texts if "most values are 0" in text]
    assert "mlp/dense_0/lhs reached 1/2,000,000 of what its scale covers" in text
    assert "column" not in text


def test_no_column_is_named_if_a_step_was_skipped():
    (text,) = warned(look(with_outlier(12), skipped=1))
    assert "clipped" in text and "column" not in text
    # Skipped before the look before: the steps since are known again.
    text = warned(look([1.0] * 8, skipped=1), look(with_outlier(12), skipped=1))[-1]
    assert "column" in text


def test_outliers_in_every_batch_are_seen_in_the_features():
    dense = np.full((SIZE, 2), 0.5)
    dense[2, 0] = 999_999
    data = Data({(3, 0): (0, 999_999)})
    (text,) = warned(look([1e6] * 16, dense=dense), data=data)
    assert "step 16: 88% of the dense values are too small" in text
    assert "999999 in column 'price'" in text
    # A scale that has clipped the outlier serves the others.
    (text,) = warned(look(with_outlier(16), dense=dense), data=data)
    assert "clipped" in text


def test_a_watch_goes_on_from_json():
    first, second = look(with_outlier(12)), look(with_outlier(22, 24))
    whole = ScaleWatch().after(first, Data({}), SIZE)
    saved = json.loads(json.dumps(dataclasses.asdict(whole)))
    restored = ScaleWatch.from_json(saved)
    assert restored.after(second, Data({}), SIZE).warnings == whole.warnings


def on_table(folder, *, workdir, outlier=None, **loop):
    """Returns a run of 20 steps on a table, of which a row may hold an outlier."""
    draw = np.random.default_rng(0)
    x, c = draw.normal(size=320), draw.integers(0, 9, 320)
    label = x + c / 3 > 1.3
    if outlier is not None:
        x[200] = outlier
    path = folder / f"{outlier}.csv"
    rows = [f"{y:d},{a:.4f},{b}" for y, a, b in zip(label, x, c, strict=True)]
    path.write_text("label,price,c\n" + "\n".join(rows) + "\n")
    data = DataConfig(
        kind="table",
        path=str(path),
        dense=("price",),
        categorical=("c",),
        transform="none",
        cache=str(folder / "cache"),
    )
    return config(workdir, data=data, **loop)


@pytest.mark.slow
def test_a_run_says_which_column_has_outliers(tmp_path):
    options = on_table(tmp_path, workdir=tmp_path / "run", outlier=1e5, log_every=50)
    code, said = train(options)
    found = summary(tmp_path / "run")
    assert code == 0 and found["warnings"]
    assert found["warnings"][0] in said
    assert "bottom_mlp/dense_1/lhs was clipped" in found["warnings"][0]
    assert "100000 in column 'price'" in found["warnings"][0]
    report = (tmp_path / "run" / "report.html").read_text()
    assert "bottom_mlp/dense_1/lhs was clipped" in report


def test_a_run_without_outliers_says_nothing(tmp_path, monkeypatch):
    support.share_steps(monkeypatch)
    train(config(tmp_path, log_every=3))
    assert summary(tmp_path)["warnings"] == []


@pytest.mark.slow
def test_an_interrupted_run_warns_as_the_whole_one(tmp_path, monkeypatch):
    support.share_steps(monkeypatch)
    options = dict(outlier=1e5, log_every=7, save_every=3)
    train(on_table(tmp_path, workdir=tmp_path / "whole", **options))
    plain = Loop.step

    def stop(self, taken):
        if self.progress.step == 14:
            raise KeyboardInterrupt
        plain(self, taken)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "step", stop)
        with pytest.raises(KeyboardInterrupt):
            train(on_table(tmp_path, workdir=tmp_path / "cut", **options))
    train(on_table(tmp_path, workdir=tmp_path / "cut", resume=True, **options))
    whole, cut = summary(tmp_path / "whole"), summary(tmp_path / "cut")
    assert whole["warnings"] and cut["warnings"] == whole["warnings"]
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
