"""A run goes on with the data of a later day: its weights, its ids, and honest NE."""

import dataclasses
import shutil

import chex
import jax
import numpy as np
import pytest
from pyarrow import csv
from rich.console import Console

import loka_jax
from loka_jax import jsonfile
from loka_jax.data import Position
from loka_jax.data.encoding import VocabularyEncoder
from loka_jax.optim import OptimConfig
from loka_jax.train import next_day, session
from loka_jax.train.checkpoints.leaves import named_leaves
from loka_jax.train.config import RunOptions
from loka_jax.train.folder.source_run import open_run
from loka_jax.train.loop import Loop
from loka_jax.train.watch.host_state import Progress
from tests.support import train as support
from tests.support.predict import config, rows, write
from tests.support.train import lines, summary, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs: of the first day, and of a second one whose users are partly new.

    The second one is killed before its first step, and resumed.
    """
    folder = tmp_path_factory.mktemp("days")
    write(folder / "day1.csv", rows(200))
    write(folder / "day2.csv", rows(160, seed=5, users=17))
    write(folder / "valid.csv", rows(40, seed=6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "write_run_page", lambda path, run: path)
        assert train(first(folder))[0] == 0
        (folder / "day1.csv").unlink()
        with patch.context() as killed:
            killed.setattr(Loop, "step", kill)
            with pytest.raises(KeyboardInterrupt):
                train(second(folder))
        resumed = RunOptions(workdir=folder / "two", resume=True)
        code, said = train(dataclasses.replace(second(folder), run=resumed))
        assert code == 0
    (folder / "said.txt").write_text(said)
    return folder


def kill(*_):
    raise KeyboardInterrupt


def first(folder):
    return config(folder, path="day1.csv", workdir="one", reserve_rows=3)


def second(folder, workdir="two"):
    """Returns the run that goes on, as the command line makes it."""
    default = next_day.default_config(folder / "one")
    assert default.data.path is None
    paths = {"path": str(folder / "day2.csv"), "valid": str(folder / "valid.csv")}
    return dataclasses.replace(
        default,
        data=dataclasses.replace(default.data, **paths),
        optim=dataclasses.replace(default.optim, lr=0.003),
        run=RunOptions(workdir=folder / workdir),
    )


def test_ids_stay_and_new_values_get_reserved_rows(folder):
    before, after = (
        loka_jax.load(folder / name).encoding.encoders for name in ("one", "two")
    )
    assert isinstance(before[0], VocabularyEncoder)
    assert isinstance(after[0], VocabularyEncoder)
    users, later = before[0].values.to_pylist(), after[0].values.to_pylist()
    assert later[: len(users)] == users and len(later) == len(users) + 3
    assert after[0].rows == before[0].rows
    said = (folder / "said.txt").read_text()
    assert (
        "user: 5 new values, 3 of them in reserved rows, of which 0 are left; 2 share "
        "id 0." in said
    )


def test_a_day_is_scored_by_the_first_run_before_it_is_trained_on(folder):
    (day,) = summary(folder / "two")["days"]
    days = [line for line in lines(folder / "two") if line["kind"] == "day"]
    assert [{key: line[key] for key in day} for line in days] == [day]
    assert (days[0]["step"], days[0]["split"]) == (0, "train")
    assert (day["data"], day["examples"]) == ("day2.csv", 160)
    said = (folder / "said.txt").read_text()
    assert "Before training on day2.csv (160 rows): AUC" in said
    assert f"NE {day['ne']:.5f}" in said
    one, two = (loka_jax.load(folder / name) for name in ("one", "two"))
    two._state = one._state  # the ids of the second day, the weights of the first
    table = csv.read_csv(folder / "day2.csv")
    scores, label = two.scores(table), np.asarray(table["label"])
    loss = -np.mean(np.where(label, np.log(scores), np.log1p(-scores)))
    chex.assert_trees_all_close(float(loss), day["logloss"], rtol=1e-6)


def test_the_final_evaluation_names_the_values_of_columns(folder):
    evaluation = jsonfile.as_dict(jsonfile.read(folder / "one" / "evaluation.json"))
    users, items = evaluation["columns"]
    assert users["column"] == "user" and items["column"] == "item"
    vocabulary = loka_jax.load(folder / "one").encoding.encoders[0]
    assert isinstance(vocabulary, VocabularyEncoder)
    for value in users["values"]:
        assert value["name"] == str(vocabulary.values[value["id"] - 1])


@pytest.fixture(scope="module")
def at_start(folder):
    """The run, state and source of a second run before its first step."""
    source = next_day.source_of(second(folder))
    assert source is not None
    run = support.build_lib.build(
        second(folder), source.saved.meta["plan"], base=source.encoding()
    )
    return run, next_day.initial_state(run, source), source


def test_a_run_starts_with_all_that_the_other_had_learned(at_start):
    run, state, source = at_start
    fresh, found = (dict(named_leaves(vars(x))) for x in (run.init(), state))
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


def test_quality_by_day_goes_on_from_run_to_run(folder, at_start):
    run, state, source = at_start
    third = source._replace(saved=open_run(folder / "two", best=False).saved)
    loop = Loop.__new__(Loop)  # as it stands before its first step
    loop.run, loop.state = run, state
    loop.progress = Progress(position=Position(0, 0, 0))
    next_day.begin(loop, third, Console(quiet=True))
    first_day, last_day = loop.progress.days
    assert first_day == summary(folder / "two")["days"][0] == last_day
    assert Progress.from_json(loop.progress.to_json()) == loop.progress


def test_a_run_goes_on_from_the_state_that_was_judged(folder, tmp_path):
    shutil.copytree(folder / "one", tmp_path / "one")
    (tmp_path / "one" / "checkpoints").rename(tmp_path / "one" / "best")
    config = dataclasses.replace(second(folder), init_from=tmp_path / "one")
    source = next_day.source_of(config)
    assert source is not None and source.saved.step > 0


def test_another_model_or_optimizer_is_refused(folder):
    other = dataclasses.replace(second(folder), optim=OptimConfig(dense="sgd"))
    with pytest.raises(ValueError, match="another model or optimizer .*optim.dense"):
        next_day.source_of(other)
    model = second(folder).model.clone(top_mlp=(8,))
    other = dataclasses.replace(second(folder), model=model)
    with pytest.raises(ValueError, match="model.top_mlp: saved .16., now .8."):
        next_day.source_of(other)


@pytest.mark.parametrize(
    "option, value", [("transform", "none"), ("reserve_rows", 9), ("dense", ("user",))]
)
def test_another_encoding_is_refused(folder, option, value):
    config = second(folder, "three")
    data = dataclasses.replace(config.data, **{option: value})
    flag = f"--data.{option.replace('_', '-')} or train a new run"
    with pytest.raises(ValueError, match=flag):
        train(dataclasses.replace(config, data=data))
    assert not (folder / "three").exists()


@pytest.fixture
def compiles(monkeypatch):
    """Skips compiling: the type checker of tests refuses a state of shapes."""
    monkeypatch.setattr(session, "_compile", lambda run, console: 0)


@pytest.mark.usefixtures("compiles")
def test_a_dry_run_opens_the_run_to_go_on_from(folder):
    def dry(init_from):
        run = RunOptions(workdir=folder / "three", dry_run=True)
        return dataclasses.replace(second(folder), run=run, init_from=init_from)

    code, said = train(dry(folder / "one"))
    assert code == 0 and "user: 5 new values, 3 of them in reserved rows" in said
    with pytest.raises(ValueError, match=f"{folder}/none holds no run"):
        train(dry(folder / "none"))
    assert not (folder / "three").exists()


@pytest.mark.usefixtures("compiles")
def test_a_dry_run_opens_the_run_to_resume(folder, tmp_path):
    resumed = RunOptions(workdir=folder / "two", resume=True, dry_run=True)
    code, said = train(dataclasses.replace(second(folder), run=resumed))
    assert code == 0 and "Examples: 160 train" in said
    other = dataclasses.replace(second(folder).data, path=str(folder / "valid.csv"))
    with pytest.raises(ValueError, match="the data differ from those of the checkp"):
        train(dataclasses.replace(second(folder), run=resumed, data=other))
    nowhere = dataclasses.replace(resumed, workdir=tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} holds no run"):
        train(dataclasses.replace(second(folder), run=nowhere))


def test_a_run_resumes_where_its_data_were_moved(folder, tmp_path):
    shutil.copytree(folder / "two", tmp_path / "two")
    moved = shutil.copy(folder / "day2.csv", tmp_path / "moved.csv")
    whole = second(folder)
    data = dataclasses.replace(whole.data, path=str(moved), cache=str(tmp_path))
    loop = dataclasses.replace(whole.loop, epochs=2)
    run = RunOptions(workdir=tmp_path / "two", resume=True)
    code, _ = train(dataclasses.replace(whole, data=data, loop=loop, run=run))
    assert code == 0
    last = summary(tmp_path / "two")
    assert last["final_step"] == 2 * summary(folder / "two")["final_step"]
    content = moved.read_text().splitlines()
    moved.write_text("\n".join(content[:-1]) + "\n")
    with pytest.raises(ValueError, match="the data differ from those of the checkp"):
        train(dataclasses.replace(whole, data=data, loop=loop, run=run))
