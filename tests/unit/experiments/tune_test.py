"""What the tuning command measures, with what, and what it adds to its table."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import pytest

from experiments import tune as script
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.table import Entry, Table
from loka_jax.measure.intervals import Interval
from loka_jax.recipe import ROLES
from loka_jax.site import SiteSpec
from loka_jax.survey.sensitivity import Effect
from tests.support.commands import assert_refused
from tests.support.configs import tiny_config

SITE = SiteSpec(64, 32, 16)
ERRORS = dict.fromkeys(ROLES, {})
TINY = ["--config", tiny_config("fp8_dlrm"), "--loop.max-steps", "4"]
TINY += ["--bottom-mlp", "8", "--top-mlp", "16"]  # FP8 fits the last layer alone


def test_a_table_that_cannot_be_added_to_is_refused_before_training(tmp_path, run):
    header = dataclasses.replace(header_here(), device_kind="NVIDIA B200")
    tables.write(tmp_path / "foreign.json", Table(header))
    line = [*TINY, "--workdir", tmp_path / "run", "--table"]
    for name, why in (
        ("foreign.json", "is not valid here"),
        ("nowhere/table.json", "table.json cannot be written"),
    ):
        assert_refused(run(script, *line, tmp_path / name), why)
        assert not (tmp_path / "run").exists()


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Returns a function that tunes with given parts, without training anything."""
    run = SimpleNamespace(source="model", sites=("a site",))
    state = SimpleNamespace(probe={"a": {"stats": 3}})
    done = SimpleNamespace(exit_code=0, run=run, state=state)
    names = ("train", "sensitivity", "measure", "_add_own_errors", "_add_refusals")
    seen = mock.Mock(spec=names)
    for name in names:
        monkeypatch.setattr(script, name, getattr(seen, name))
    seen.train.return_value = done
    seen.path = tmp_path / "[b]" / "table.json"
    seen.path.parent.mkdir()

    def tuned(effects, measured, *options):
        seen.sensitivity.return_value, seen.measure.return_value = effects, measured
        workdir = ["--workdir", str(tmp_path / "run")]
        line = [*TINY, *workdir, "--table", str(seen.path), *options]
        return script.main(line), seen

    return tuned


def test_what_is_timed_already_is_not_timed_again(tuned):
    _, seen = tuned({}, (), "--tune.pairs", "9")
    times = {"training": {"xla bf16": 1.0}}
    entries = {SITE: Entry(times), dataclasses.replace(SITE, m=128): Entry()}
    tables.write(seen.path, Table(header_here(), entries))
    found = [Table(header_here(), {SITE: Entry(errors={"model a": ERRORS})})]
    options = ["--tune.pairs", "7", "--tune.held-out-batches", "5"]
    assert tuned({}, found, *options)[0] == 0
    name, sites, stats, tuning = seen.measure.call_args.args
    assert (name, sites, stats, tuning.pairs) == ("model", ("a site",), {"a": 3}, 7)
    assert seen.measure.call_args.kwargs["timed"] == [SITE]
    assert tables.read(seen.path).sites[SITE].times == times  # and is kept
    assert seen.sensitivity.call_args.args[2] == 5
    calls = [call[0] for call in seen.mock_calls if call[1][:1] == (seen.path,)]
    assert calls[-2:] == ["_add_own_errors", "_add_refusals"]  # seen, in draws' place
    assert seen._add_refusals.call_args.args[3] == 5
    assert seen.train.call_args.kwargs == {"script": "tune.py"}
    assert seen.train.call_args.args[0].probe.every == 1  # of a short run


def test_effects_are_relative_and_left_out_if_not_finite(tuned, capsys):
    effect = Effect(Interval(1e-3, 5e-4, 2e-3), 0.1, 0.5, 64)
    lost = effect._replace(change=Interval(1e-3, 5e-4, float("nan")))
    code, seen = tuned({"a": effect, "b": lost, script.ALL: effect}, ())
    assert code == 0
    found = seen.measure.call_args.kwargs["effects"]
    assert found == {"a": Interval(2e-3, 1e-3, 4e-3)}
    assert "b: its effect on the loss is not finite" in capsys.readouterr().out


def test_what_the_plan_gives_up_is_noted_at_sites_with_own_errors(
    tmp_path, monkeypatch
):
    path, other = tmp_path / "table.json", dataclasses.replace(SITE, m=128)
    errors = {"model a": ERRORS, "model b": ERRORS}
    table = Table(header_here(), {SITE: Entry(errors=errors), other: Entry()})
    tables.write(path, table)
    options = SimpleNamespace(limits=SimpleNamespace(loss=0.25), by_pattern="rules")
    config = SimpleNamespace(dispatch=options)
    run = SimpleNamespace(source="model", config=config, sites=("sites",))

    def refusals(run, state, plan, *, limit, max_batches, **_):
        assert (plan, limit, max_batches) == ("plan", 0.25, 5)
        return {"a": "it raises the loss", "c": "not here"}

    monkeypatch.setattr(script, "make_plan", lambda *_, **__: "plan")
    monkeypatch.setattr(script, "refusals", refusals)
    script._add_refusals(path, run, "state", 5, print)
    found = tables.read(path).sites
    assert found[SITE].refused == {"model a": "it raises the loss"}
    assert found[SITE].errors == errors and not found[other].refused
