"""The configuration of a run: range checks, and what identifies it."""

import dataclasses
import json
import pathlib
import re

import pytest

from experiments.configs import get_config
from loka_jax.data import Schema
from loka_jax.data.config import GENERATED_ROWS
from loka_jax.data.open import identity_of_generated
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.local import shipped_path
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.models import Dlrm, Hstu
from loka_jax.optim import OptimConfig
from loka_jax.probe.site import ErrorsAlone
from loka_jax.train.config import (
    Dcnv2Config,
    DispatchOptions,
    DlrmConfig,
    EmbeddingConfig,
    HstuConfig,
    LoopConfig,
    ProbeOptions,
    RunOptions,
)
from loka_jax.train.model import model_of


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"rows": GENERATED_ROWS[:7]}},
        {"data": {"signal": 1.0}},
        {"data": {"examples": 1000}},
        {"model": {"top_mlp": (256, 64)}},
        {"embedding": {"dim": 8}},
        {"optim": {"lr": 0.01}},
        {"loop": {"batch_size": 8192}},
        {"loop": {"microbatches": 2}},
        {"run": {"workdir": pathlib.Path("x")}, "loop": {"max_steps": 9}, "seed": 3},
    ],
)
def test_operands_are_a_runs_own_of_its_data_model_optimizer_and_rows(changes):
    def source(**changes):
        parts = {
            name: dataclasses.replace(getattr(DEFAULT, name), **part)
            if isinstance(part, dict)
            else part
            for name, part in changes.items()
        }
        config = dataclasses.replace(DEFAULT, **parts)
        return config.source(identity_of_generated(config.data, config.seed))

    assert re.fullmatch("fp8_dlrm@[0-9a-f]{12}", source())
    assert (source(**changes) == source()) == ("seed" in changes)


@pytest.mark.parametrize("name", ["fp8_dlrm", "fp8_dlrm_wide"])
def test_shipped_errors_are_those_of_the_default_runs(name):
    config = get_config(name)
    own = config.source(identity_of_generated(config.data, config.seed))
    for device in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        sites = tables.read(shipped_path(device)).sites.items()
        rows = {s.m for s, x in sites for run in x.errors if run.startswith(f"{own} ")}
        assert config.loop.batch_size in rows


def dlrm(name="x", seed=0, **options):
    return DlrmConfig(name=name, seed=seed, model=Dlrm(**options))


DEFAULT = get_config("fp8_dlrm")
DELAYED = "fp8_tensorwise_delayed"


NAN = float("nan")


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: LoopConfig(log_every=0), "--loop.log-every 0 must be at least 1."),
        (lambda: LoopConfig(batch_size=10, microbatches=3), "of --loop.microbatches 3"),
        (lambda: LoopConfig(batch_size=10**10), "must be at most 4194304."),
        (lambda: EmbeddingConfig(dim=0), "--embedding.dim 0 must be in 1..4096."),
        (lambda: EmbeddingConfig(init_stddev=NAN), "stddev nan must be in [0, 10)."),
        (lambda: dlrm(seed=-1), "--seed -1 must be in 0..2147483647."),
        (lambda: dlrm(name="../a"), "letters, digits and any of"),
        (lambda: dlrm(dropout_rate=NAN), "--dropout-rate nan must be in [0, 1)."),
        (lambda: dlrm(top_mlp=(8, 0)), "--top-mlp (8, 0) must be positive."),
        (lambda: dlrm(recipe="fp8_rowise"), "did you mean 'fp8_rowwise'"),
        (
            lambda: HstuConfig(name="x", model=Hstu(input_scale=0.0)),
            "--input-scale 0.0 must be in 1e-6..1e6.",
        ),
        (lambda: OptimConfig(tweo=-1.0), "--optim.tweo -1.0 must lie between 0.0"),
        (lambda: RunOptions(profile="5:0"), "must be START:STEPS"),
        (lambda: RunOptions(watchdog=1e6 + 1), "at most 1,000,000"),
        (lambda: ProbeOptions(every=-1), "--probe.every -1 must be at least 0"),
        (lambda: ProbeOptions(begin=-1), "--probe.begin -1 must be at least 0"),
        (lambda: ProbeOptions(decay=0.0), "decay 0.0 must be in (0, 1]"),
        (lambda: DispatchOptions(tune_seconds=NAN), "seconds nan must be positive"),
        (lambda: DispatchOptions(check_seconds=0.0), "seconds 0.0 must be positive"),
        (lambda: DispatchOptions(rules=("=bf16",)), "PATTERN=CHOICE"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_option(make, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make()


def test_what_is_written_as_text_is_understood():
    assert RunOptions(profile="100:5").profile_steps() == range(100, 105)
    options = DispatchOptions(rules=("a=bf16", "b=f32", "a=x=y"))
    assert options.by_pattern == {"a": "x=y", "b": "f32"}  # the last one counts


def test_the_identity_is_json_and_tells_models_but_not_executions_apart():
    identity = dlrm().identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity["model"]["kind"] == "Dlrm"
    assert identity["model"]["recipe"] == "fp8_tensorwise"
    assert identity != Dcnv2Config(name="x").identity()
    options = RunOptions(workdir=pathlib.Path("a"), resume=True, profile="1:2")
    assert identity == dataclasses.replace(dlrm(), run=options).identity()


def test_steps_are_observed_when_they_are_due():
    options = ProbeOptions(every=4)
    due = {step: options.config_at(step) for step in range(90)}
    moves = {k: v.moves_weight_covariances for k, v in due.items() if v is not None}
    early = range(6)  # four times as often until the first review
    assert moves == {step: step == 80 for step in {*early, *range(0, 90, 4)}}
    assert due[0].recipes == options.recipes and due[0].decay == options.decay
    assert options.look_every == 4
    for never, looks in ((ProbeOptions(), 64), (ProbeOptions(every=0), 0)):
        assert not any(never.config_at(step) for step in range(10))
        assert never.first_review() is None and never.look_every == looks
    # After five observed steps beside the first.
    assert options.first_review() == 6 and ProbeOptions(every=64).first_review() == 81
    # Errors alone where a plan has it observe.
    chosen = ProbeOptions(begin=128)
    assert not chosen.config_at(127) and chosen.first_review() == 128 + 81
    assert chosen.first() == ErrorsAlone(decay=0.7) and chosen.observe_every == 64
    observed = [x for x in range(130) if ProbeOptions(every=64).config_at(x)]
    assert observed == [0, 16, 32, 48, 64, 80, 128]
    later = ProbeOptions(every=64, begin=128)
    due = {step: x for step in range(1409) if (x := later.config_at(step)) is not None}
    assert [*due] == [128, 144, 160, 176, 192, 208, *range(256, 1409, 64)]
    # Not by the first weight, which nothing tells from others.
    assert [step for step, x in due.items() if x.moves_weight_covariances] == [1408]
    assert later.first_review() == 128 + 81


def test_the_model_of_a_run_has_the_tasks_and_columns_of_its_data():
    two = Schema(label="y", dense=("a",), categorical=("c", "d"), vocab_sizes=(5, 7))
    many = dict(multi=("e",), vocab_sizes=(5, 7, 9))
    config = dataclasses.replace(dlrm(), loop=LoopConfig(batch_size=48, microbatches=3))
    found = model_of(config, two, devices=2)
    assert (found.tables.rows, found.tables.dim) == ((5, 7), 16)
    assert {site.spec.m for site in found.list_sites(DispatchPlan())} == {8}
    assert {site.spec.m for site in found.list_sites(DispatchPlan(), 32)} == {32}
    assert [x.shape for x in found.inputs(9)] == [(9, 1), (9, 2, 16)]
    # 2^22 examples of 511 ids are below 2^31.
    config = dataclasses.replace(config, loop=LoopConfig(batch_size=2**22))
    model_of(config, dataclasses.replace(two, slots=(509,), **many))
    for change, reason in (
        (dict(further_labels=("z",)), "the data have 2 labels"),
        (dict(slots=(510,), **many), "--loop.batch-size 4194304 times 512 ids"),
    ):
        with pytest.raises(ValueError, match=reason):
            model_of(config, dataclasses.replace(two, **change))
