"""What is said of outliers: the operand, the step, the ratio and the column, once."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax import jsonfile
from loka_jax.data import Batch, Position, Schema
from loka_jax.recipe import get_recipe
from loka_jax.scaling import (
    DelayedScaling,
    init_delayed,
    smallest_ratio,
    update_delayed,
)
from loka_jax.train.watch.scale_watch import (
    LOOK_STEPS,
    Finding,
    ScaleWatch,
    find,
    largest_value,
    take_look,
)

RECIPE = get_recipe("fp8_tensorwise_delayed")
BATCHES, SIZE = 5, 4  # in an epoch; rows


class Data:
    """Batches of ones but for a value at (epoch, step), in a column of two."""

    schema = Schema(
        label="y", dense=("price", "age"), categorical=("c",), vocab_sizes=(2,)
    )
    num_examples = BATCHES * SIZE
    num_batches = lambda self, batch_size: BATCHES  # noqa: E731

    def __init__(self, values):
        self.values = values

    def batch(self, position, batch_size, *, shuffle):
        assert shuffle and batch_size == SIZE
        dense = np.ones((SIZE, 2), np.float32)
        column, value = self.values.get((position.epoch, position.step), (0, 1.0))
        dense[1, column] = value
        return Batch(dense, np.zeros((SIZE, 1), np.int32), dense[:, 0], dense[:, 0])


@functools.partial(jax.jit, static_argnums=1)
def after(of_steps, recipe):
    """Returns the state of a site after steps with these amaxes of its operands."""
    start = init_delayed(recipe)
    add = functools.partial(update_delayed, recipe=recipe)
    return jax.lax.scan(lambda s, a: (add(s, a), None), start, of_steps)[0]


def look(amaxes, *, g=None, skipped=0, dense=((1.0, 1.0),)):
    """Returns a look after steps with these amaxes of lhs and rhs."""
    of_steps = np.stack([amaxes, np.ones(len(amaxes)), g or amaxes], axis=1)
    state = after(np.float32(of_steps), RECIPE)
    step = len(amaxes) + skipped
    position = Position(step // BATCHES, step % BATCHES, 0)
    recipes = {"mlp/dense_0": RECIPE, "head": get_recipe("f32")}
    how = dict(step=step, position=position, skipped=jnp.asarray(skipped))
    return take_look({"mlp/dense_0": state}, recipes, jnp.float32(dense), **how)


def warned(*looks, data=None):
    watch = ScaleWatch()
    for one in looks:
        saved = json.loads(json.dumps(dataclasses.asdict(watch)))
        watch = jsonfile.typed(saved, ScaleWatch)  # as a resumed run
        watch = watch.after(one, data or Data({}), SIZE)
    return watch.warnings


def with_outlier(step, steps=16, value=1e5):
    return [value if number == step else 1.0 for number in range(1, steps + 1)]


def test_an_outlier_is_named_with_its_column_by_one_look():
    # Step 12 is batch 1 of epoch 2.
    data = Data({(2, 1): (1, -7e4)})
    (text,) = warned(look(with_outlier(12), g=[1.0] * 16), data=data)
    assert text.startswith("step 12: mlp/dense_0/lhs was clipped at 1/32,768 of its ")
    assert text.endswith(" the largest dense value was -70000 in column 'age'.")
    for age in (0, LOOK_STEPS - 1):
        (text,) = warned(look(with_outlier(16 - age)))
        assert text.startswith(f"step {16 - age}: ")
    assert warned(look(with_outlier(16 - LOOK_STEPS))) == ()


def test_of_several_sites_of_a_vmap_the_one_is_named():
    calm, loud = (
        after(np.float32([amaxes] * 3).T, RECIPE).table
        for amaxes in ([1.0] * 16, with_outlier(12))
    )
    sites = {"tokens": DelayedScaling(jnp.stack([calm, loud, calm]))}
    how = dict(step=16, position=Position(3, 1, 0), skipped=jnp.asarray(0))
    seen = take_look(sites, {"tokens": RECIPE}, jnp.ones((1, 2)), **how)
    (text,) = warned(seen)
    assert "step 12: tokens[1]/lhs was clipped" in text
    assert "tokens[0]" not in text and "tokens[2]" not in text


def test_an_operand_and_column_are_named_once():
    data = Data({(2, 1): (0, 1e5), (4, 1): (0, 1e5), (5, 3): (1, 1e5)})
    outliers = ((12, 16), (22, 24), (29, 32))
    first, second = warned(*(look(with_outlier(*x)) for x in outliers), data=data)
    assert "'price'" in first and "'age'" in second


def test_nothing_is_said_of_healthy_amaxes():
    growing = 0.1 * 2.0 ** np.arange(16)
    falling = 1.5 ** -np.arange(16)
    scattered = np.exp(np.random.default_rng(0).normal(size=16))
    for amaxes in (growing, falling, scattered, [0.0] * 12 + [1.0] * 4):
        assert warned(look(list(amaxes))) == ()


def test_values_that_a_scale_flushes_are_named():
    texts = warned(look([1e6] * 12 + [1.0] * 4, g=[1.0] * 16))
    (text,) = [text for text in texts if "most values are 0" in text]
    assert "mlp/dense_0/lhs reached 1/2,097,152 of what its scale covers" in text
    assert "column" not in text


def test_no_column_is_named_if_a_step_was_skipped():
    (text,) = warned(look(with_outlier(12), skipped=1))
    assert "clipped" in text and "column" not in text
    # Skipped before the look before: the steps since are known again.
    text = warned(look([1.0] * 8, skipped=1), look(with_outlier(12), skipped=1))[-1]
    assert "column" in text


def test_outliers_in_every_batch_are_seen_in_the_features():
    def features(large):
        dense = np.full((SIZE, 2), 0.5)
        dense.ravel()[:large] = 999_999
        return dense

    data, amaxes = Data({(3, 0): (0, 999_999)}), [1e6] * 16
    (text,) = warned(look(amaxes, dense=features(3)), data=data)
    assert "step 16: 62% of the dense values are too small" in text
    assert "999999 in column 'price'" in text
    # Half of the values may be, and a scale that has clipped one serves the others.
    assert warned(look(amaxes, dense=features(4)), data=data) == ()
    (text,) = warned(look(with_outlier(16), dense=features(3)), data=data)
    assert "clipped" in text


def test_the_worst_step_is_found_with_all_its_operands():
    """Of ratios by site, operand and age; those at the bounds are fine."""
    both = {"a": RECIPE, "b": get_recipe("fp8_tensorwise_delayed_bf16_drhs")}
    ratios = np.ones((2, 3, LOOK_STEPS), np.float32)
    flushed = 16 * smallest_ratio("lhs", RECIPE)
    ratios[0, 0, 1:4] = 16.0, flushed, 0.0
    assert find(both, ratios) == []
    ratios[0, 0, 1:3] = 16.1, flushed / 1.01
    assert [(x.fault, x.age) for x in find(both, ratios)] == [
        ("clipped", 1),
        ("flushed", 2),
    ]
    ratios[0, :2, 5], ratios[0, 2, 6] = (20.0, 40.0), 90.0
    ratios[1, 0, 5], ratios[1, 1, 6] = 100.0, 30.0
    found = find(both, ratios)[0]
    assert found == Finding("clipped", 5, {"b/lhs": 100.0, "a/rhs": 40.0, "a/lhs": 20})
    assert list(found.ratios) == ["b/lhs", "a/rhs", "a/lhs"]


def test_the_largest_value_is_that_of_the_batch_before():
    data, after_epoch = Data({(0, 4): (1, -5.0), (1, 0): (0, 7.0)}), Position(1, 1, 0)
    expected = {0: ("price", 7.0), 1: ("age", -5.0), 6: None}  # before the first
    for age, found in expected.items():
        assert largest_value(data, after_epoch, SIZE, age) == found
    data.schema = dataclasses.replace(Data.schema, dense=())
    assert largest_value(data, after_epoch, SIZE, 0) is None
