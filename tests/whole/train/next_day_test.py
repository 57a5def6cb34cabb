"""A run goes on with the data of a later day: its weights, its ids, and honest NE."""

import dataclasses

import chex
import jax

from loka_jax.train import next_day
from loka_jax.train.build import build
from loka_jax.train.checkpoints.leaves import named_leaves
from tests.support.predict import config, rows, write
from tests.support.train import train


def test_a_run_starts_with_all_that_the_other_had_learned(tmp_path):
    for name, made in (("day1", rows(200)), ("day2", rows(160, seed=5, users=17))):
        write(tmp_path / f"{name}.csv", made)
    write(tmp_path / "valid.csv", rows(40, seed=6))
    first = config(tmp_path, path="day1.csv", workdir="one", reserve_rows=3)
    assert train(first)[0] == 0
    (tmp_path / "day1.csv").unlink()
    second = next_day.default_config(tmp_path / "one")
    paths = {"path": str(tmp_path / "day2.csv"), "valid": str(tmp_path / "valid.csv")}
    data = dataclasses.replace(second.data, **paths)
    second = dataclasses.replace(second, data=data)
    source = next_day.source_of(second)
    assert source is not None
    run = build(second, source.saved.meta["plan"], base=source.encoding())
    state = next_day.initial_state(run, source)
    fresh, found = (named_leaves(vars(x)) for x in (run.init(), state))
    trained = source.checkpoints.read(source.saved, jax.eval_shape(lambda: fresh))
    schedules = {name for name in found if name.endswith("1/count")}
    assert len(schedules) == 1
    for name, leaf in found.items():
        is_carried = name.split("/")[0] in next_day._CARRIED and name not in schedules
        expected = trained[name] if is_carried else fresh[name]
        chex.assert_trees_all_equal(leaf, expected)
    (moments,) = (leaf for name, leaf in found.items() if name.endswith("0/count"))
    assert int(moments) == source.saved.step > 0
    assert int(state.step) == 0
    facts = run.splits.report["categorical"]["user"]
    assert (facts["new_values"], facts["new_rows"]) == (5, 3)
