"""The tuning command, from training to a table that a run follows."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import pytest

from experiments import train as train_script
from experiments import tune as script
from experiments.bench import dispatch as bench
from loka_jax.dispatch import table as tables
from loka_jax.dispatch import tuning
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.table import MEASURES, Entry, Table
from loka_jax.measure.intervals import Interval
from loka_jax.recipe import ROLES
from loka_jax.site import BF16, Choice
from tests.support import train as support

ROW = "xla fp8_rowwise"
TINY = ["--config", "fp8_dlrm_tiny", "--loop.max-steps", "4"]
TINY += ["--bottom-mlp", "8", "--top-mlp", "16"]  # FP8 fits the last layer alone


@pytest.mark.slow
def test_a_table_is_measured_and_followed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "candidates", lambda spec: [BF16, Choice.parse(ROW)])
    support.share_data(monkeypatch)
    path = tmp_path / "table.json"
    options = ["--tune.pairs", "2", "--tune.rows", "16", "--tune.workers", "1"]
    options += ["--tune.held-out-batches", "1"]
    workdir = ["--workdir", str(tmp_path / "probed")]
    assert script.main([*TINY, *workdir, *options, "--table", str(path)]) == 0
    table = tables.read(path)
    assert len(table.sites) == 3
    for entry in table.sites.values():
        assert BF16.name in entry.times["training"]
        assert all(source.startswith("fp8_dlrm_tiny ") for source in entry.errors)
    effects = [source for entry in table.sites.values() for source in entry.effects]
    assert effects == ["fp8_dlrm_tiny top_mlp/dense_0"]
    assert ("There is no GPU with FP8" in capsys.readouterr().out) == (
        jax.default_backend() == "cpu"
    )
    workdir = ["--workdir", str(tmp_path / "planned")]
    loose = ["--dispatch.limits.speedup", "0.01", "--dispatch.limits.healthy", "9"]
    assert train_script.main([*TINY, *workdir, *loose, "--plan", str(path)]) == 0
    said = capsys.readouterr().out
    assert "Dispatch" in said and "top_mlp/dense_0" in said
    plan = json.loads((tmp_path / "planned" / "plan.json").read_text())
    assert {one["choice"] for one in plan.values()} <= {BF16.name, ROW}
    assert all(one["speedup"] for one in plan.values())


@pytest.mark.parametrize(
    "text, why",
    [("{", "not a dispatch table"), (None, "is not valid here")],
    ids=["broken", "foreign"],
)
def test_a_table_that_cannot_be_added_to_is_refused(tmp_path, capsys, text, why):
    path = tmp_path / "table.json"
    if text is None:
        header = dataclasses.replace(header_here(), device_kind="NVIDIA B200")
        tables.write(path, Table(header))
    else:
        path.write_text(text)
    before = path.read_text()
    assert script.main([*TINY, "--table", str(path)]) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1
    assert path.read_text() == before


def test_a_table_that_cannot_be_written_is_refused_before_training(tmp_path, capsys):
    path = tmp_path / "nowhere" / "table.json"
    workdir = tmp_path / "run"
    assert script.main([*TINY, "--workdir", str(workdir), "--table", str(path)]) == 2
    assert "table.json cannot be written" in capsys.readouterr().err
    assert not workdir.exists()


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Returns a function that tunes with given parts, without training anything."""
    config = SimpleNamespace(name="model")
    run = SimpleNamespace(config=config, sites=())
    done = SimpleNamespace(exit_code=0, run=run, state=SimpleNamespace(probe={}))
    monkeypatch.setattr(script, "train", lambda *_, **__: done)
    for after in ("_add_own_errors", "_add_refusals"):
        monkeypatch.setattr(script, after, lambda *_: None)

    def tuned(effects, measure):
        monkeypatch.setattr(script, "sensitivity", lambda *_, **__: effects)
        monkeypatch.setattr(script, "measure", measure)
        workdir = ["--workdir", str(tmp_path / "run")]
        table = ["--table", str(tmp_path / "[bold]" / "table.json")]
        (tmp_path / "[bold]").mkdir()
        return script.main([*TINY, *workdir, *table])

    return tuned


def test_messages_of_a_compiler_are_printed_as_they_are(tuned, tmp_path, capsys):
    def measure(*_, say, **__):
        say("does not compile: unexpected [/b] \x1b[2J")
        yield Table(header_here())

    assert tuned({}, measure) == 0
    table = tmp_path / "[bold]" / "table.json"
    assert capsys.readouterr().out.splitlines()[-2:] == [
        r"does not compile: unexpected [/b] \x1b[2J",
        f"Table: {table}",
    ]
    assert tables.read(table) == Table(header_here())


def test_effects_that_are_not_finite_are_left_out_of_the_table(tuned, capsys):
    effect = {"change": 1e-3, "low": 5e-4, "high": 2e-3, "loss": 0.5}
    found = []

    def measure(*_, effects, **__):
        found.append(effects)
        return ()

    lost = effect | {"high": float("nan")}
    assert tuned({"a": effect, "b": lost, script.ALL: effect}, measure) == 0
    assert found == [{"a": Interval(2e-3, 1e-3, 4e-3)}]
    assert "b: its effect on the loss is not finite" in capsys.readouterr().out


@pytest.mark.slow
def test_a_plan_that_is_not_a_file_is_refused(tmp_path, capsys):
    workdir = ["--workdir", str(tmp_path / "run")]
    assert train_script.main([*TINY, *workdir, "--plan", "nowhere.json"]) == 2
    assert "is not a file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "recipe, k, n, passes",
    [
        ("fp8_rowwise", 256, 768, False),
        ("fp8_tensorwise", 256, 768, False),
        ("fp8_rowwise", 123_200, 1024, False),
        ("fp8_tensorwise", 123_200, 1024, True),
        ("fp8_rowwise", 4096, 4096, True),
        ("fp8_rowwise", 2048, 4096, False),
        ("fp8_tensorwise", 4096, 2048, True),
        ("fp8_tensorwise", 8200, 8200, False),
    ],
)
def test_torchaos_filter(recipe, k, n, passes):
    assert bench.passes_torchao(recipe, k, n) is passes


@pytest.mark.slow
def test_whole_models_are_compared(tmp_path, capsys):
    path = tmp_path / "table.json"
    measures = {name: Interval(0.03, 0.03, 0.03) for name in MEASURES}
    errors = {role: {"fp8_rowwise": measures} for role in ROLES}
    times = {BF16.name: 2.0, ROW: 1.0}
    model, shapes = bench.MODELS["fp8_dcnv2"]
    sites = bench.nn.list_sites(
        model.clone(recipe="fp8_rowwise"), *bench.make_inputs(shapes(64), 0)
    )
    own = {f"fp8_dcnv2 {site.path}": errors for site in sites}
    entry = Entry({"training": times, "inference": times}, own)
    known = {table_key(site.spec): entry for site in sites if site.spec.n > 1}
    tables.write(path, Table(header_here(), known))
    found = bench.main(
        bench.Arguments(
            table=path, models=("fp8_dcnv2",), batch_size=64, recipes=("fp8_rowwise",)
        )
    )["models"]["fp8_dcnv2"]
    assert not found["failed"]
    assert {"training dispatch", "training xla fp8_rowwise"} <= set(found["times"])
    assert {"inference dispatch inference", "inference xla bf16"} <= set(found["times"])
    assert set(found["plans"]["dispatch"].values()) == {ROW}
    assert "XLA bf16" in capsys.readouterr().out
