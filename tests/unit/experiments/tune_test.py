"""What the tuning command measures, with what, and what it adds to its table."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest

from experiments import tune as script
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.table import Entry, Table
from loka_jax.measure.intervals import Interval
from loka_jax.recipe import ROLES
from loka_jax.site import SiteSpec
from tests.support.commands import assert_refused

SITE = SiteSpec(64, 32, 16)
ERRORS = dict.fromkeys(ROLES, {})
TINY = ["--config", "fp8_dlrm_tiny", "--loop.max-steps", "4"]
TINY += ["--bottom-mlp", "8", "--top-mlp", "16"]  # FP8 fits the last layer alone


def test_a_table_that_cannot_be_added_to_is_refused_before_training(tmp_path, capsys):
    header = dataclasses.replace(header_here(), device_kind="NVIDIA B200")
    tables.write(tmp_path / "foreign.json", Table(header))
    workdir = tmp_path / "run"
    for name, why in (
        ("foreign.json", "is not valid here"),
        ("nowhere/table.json", "table.json cannot be written"),
    ):
        line = [*TINY, "--workdir", str(workdir), "--table", str(tmp_path / name)]
        assert_refused((script.main(line), *capsys.readouterr()), why)
        assert not workdir.exists()


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Returns a function that tunes with given parts, without training anything."""
    config = SimpleNamespace(name="model")
    run = SimpleNamespace(config=config, sites=("a site",))
    state = SimpleNamespace(probe={"a": {"stats": 3}})
    done = SimpleNamespace(exit_code=0, run=run, state=state)
    seen = SimpleNamespace(trained=[], after=[], path=tmp_path / "[b]" / "table.json")
    seen.path.parent.mkdir()

    def train(config, arguments, console, *, script):
        seen.trained.append((config, script))
        return done

    def sensitivity(run, state, **options):
        seen.sensitivity = options
        return seen.effects

    monkeypatch.setattr(script, "train", train)
    monkeypatch.setattr(script, "sensitivity", sensitivity)
    for after in ("_add_own_errors", "_add_refusals"):
        call = functools.partial(lambda *of: seen.after.append(of), after)
        monkeypatch.setattr(script, after, call)

    def tuned(effects, measure, *options):
        seen.effects = effects
        monkeypatch.setattr(script, "measure", measure)
        workdir = ["--workdir", str(tmp_path / "run")]
        line = [*TINY, *workdir, "--table", str(seen.path), *options]
        return script.main(line), seen

    return tuned


def test_what_is_timed_already_is_not_timed_again(tuned):
    given = []

    def measure(name, sites, stats, options, **more):
        given.append((name, sites, stats, options.pairs, more["timed"]))
        yield Table(header_here(), {SITE: Entry(errors={"model a": ERRORS})})

    times = {"training": {"xla bf16": 1.0}}
    other = dataclasses.replace(SITE, m=128)
    _, seen = tuned({}, lambda *_, **__: (), "--tune.pairs", "9")
    table = Table(header_here(), {SITE: Entry(times), other: Entry()})
    tables.write(seen.path, table)
    options = ["--tune.pairs", "7", "--tune.held-out-batches", "5"]
    assert tuned({}, measure, *options)[0] == 0
    assert given == [("model", ("a site",), {"a": 3}, 7, [SITE])]
    assert tables.read(seen.path).sites[SITE].times == times  # and is kept
    assert seen.sensitivity == {"recipe": "fp8_tensorwise", "max_batches": 5}
    names, paths = zip(*[of[:2] for of in seen.after[-2:]], strict=True)
    assert names == ("_add_own_errors", "_add_refusals")  # what was seen replaces draws
    assert set(paths) == {seen.path} and seen.after[-1][4] == 5
    assert [name for _, name in seen.trained] == ["tune.py"] * 2
    assert seen.trained[0][0].probe.every == 10


def test_effects_are_relative_and_left_out_if_not_finite(tuned, capsys):
    effect = {"change": 1e-3, "low": 5e-4, "high": 2e-3, "loss": 0.5}
    found = []

    def measure(*_, effects, **__):
        found.append(effects)
        return ()

    lost = effect | {"high": float("nan")}
    assert tuned({"a": effect, "b": lost, script.ALL: effect}, measure)[0] == 0
    assert found == [{"a": Interval(2e-3, 1e-3, 4e-3)}]
    assert "b: its effect on the loss is not finite" in capsys.readouterr().out


def test_what_the_plan_gives_up_is_noted_at_sites_with_own_errors(
    tmp_path, monkeypatch
):
    path, other = tmp_path / "table.json", dataclasses.replace(SITE, m=128)
    errors = {"model a": ERRORS, "model b": ERRORS}
    table = Table(header_here(), {SITE: Entry(errors=errors), other: Entry()})
    tables.write(path, table)
    options = SimpleNamespace(limits=SimpleNamespace(loss=0.25), by_pattern="rules")
    config = SimpleNamespace(dispatch=options, name="model")
    run = SimpleNamespace(config=config, sites=("sites",))

    def refusals(run, state, plan, *, limit, max_batches, **_):
        assert (plan, limit, max_batches) == ("plan", 0.25, 5)
        return {"a": "it raises the loss", "c": "not here"}

    monkeypatch.setattr(script, "make_plan", lambda *_, **__: "plan")
    monkeypatch.setattr(script, "refusals", refusals)
    script._add_refusals(path, run, "state", 5, print)
    found = tables.read(path).sites
    assert found[SITE].refused == {"model a": "it raises the loss"}
    assert found[SITE].errors == errors and not found[other].refused
