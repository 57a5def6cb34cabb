"""An exported run scores as its evaluation did, where only jax is installed."""

import dataclasses
import gc
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pyarrow import csv

import loka_jax
from experiments import export as command
from experiments.configs import find_config
from loka_jax import nn
from loka_jax.data import Schema
from loka_jax.data.generated import schema_of
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.export import export_run, forms, loader
from loka_jax.export.encoding import inputs_as_given
from loka_jax.export.folder import write_model
from loka_jax.export.forms import make_form
from loka_jax.export.programs import evaluated
from loka_jax.ops.device import HOPPER, Device
from loka_jax.predict.trained import untrained
from loka_jax.site import Choice
from loka_jax.train.step import INFERENCE_OPTIONS
from tests.support import predict as support
from tests.support import train as runs
from tests.support.permissions import modes, umask
from tests.unit.experiments.cli_test import assert_refused

BATCH = 32  # of the run
# What jax needs: a clean environment has nothing else.
NEEDED = re.compile(
    r"(jax|jaxlib|jax_plugins|jax_cuda\w+|numpy|ml_dtypes|opt_einsum|scipy|nvidia)(\W.*)?"
)
SCRIPT = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import loader
model = loader.load(sys.argv[2])
rows = json.load(sys.stdin)
scores = model.scores(rows).tolist()
print(json.dumps({"scores": scores, "modules": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return support.train_and_lose_the_data(tmp_path_factory.mktemp("trained"))


def exported(trained, tmp_path_factory, sizes):
    out = tmp_path_factory.mktemp("exported") / "model"
    with umask(0o027):
        return out, export_run(trained.workdir, out, batch_sizes=sizes)


def test_who_may_read_the_folder_follows_the_umask(one):
    assert modes(one[0]) == {0o640, 0o750}


@pytest.fixture(scope="module")
def one(trained, tmp_path_factory):
    return exported(trained, tmp_path_factory, (BATCH,))


@pytest.fixture(scope="module")
def several(trained, tmp_path_factory):
    return exported(trained, tmp_path_factory, (16, 1, BATCH))


def columns(trained):
    table = csv.read_csv(trained.test)
    return {name: table[name].to_pylist() for name in ("price", "user", "item")}


def in_a_clean_environment(folder, rows, tmp_path, platform):
    """Returns the scores of rows where only jax is installed, and all modules."""
    site = pathlib.Path(importlib.util.find_spec("jax").origin).parents[1]
    for path in site.iterdir():
        if NEEDED.fullmatch(path.name):
            (tmp_path / path.name).symlink_to(path)
    env = {"JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ended = subprocess.run(
        [sys.executable, "-I", "-S", "-c", SCRIPT, str(tmp_path), str(folder)],
        input=json.dumps(rows),
        env=os.environ | env,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    return np.array(said["scores"], np.float32), said["modules"]


def test_scores_are_the_evaluations_where_only_jax_is_installed(trained, one, tmp_path):
    rows = columns(trained)
    scores, modules = in_a_clean_environment(one[0], rows, tmp_path, "cpu")
    logits = trained.logits.astype(np.float64)
    assert np.array_equal(scores, (1 / (1 + np.exp(-logits))).astype(np.float32))
    top = {name.partition(".")[0] for name in modules}
    assert not top & {"loka_jax", "flax", "pyarrow", "safetensors"}
    assert "flatbuffers" in top


@pytest.mark.gpu
def test_mosaic_kernels_run_where_only_jax_is_installed(tmp_path):
    config = find_config("fp8_dlrm")
    model = config.model.clone(norm="layer", recipe="fp8_rowwise")
    schema = schema_of(config.data)
    trained = untrained(dataclasses.replace(config, model=model), schema)
    sites = trained.network.sites_at(DispatchPlan(), 128)
    decision = Decision(Choice.parse("pallas fp8_rowwise"), "asked")
    plan = DispatchPlan(tuple((s.path, decision) for s in sites if s.has_choice))
    form = make_form(trained, "cuda", 128, plan)
    spec, out = inputs_as_given(schema), tmp_path / "model"
    found = write_model(trained, spec, iter([form]), out)
    assert found.programs[0].compute_capability is not None
    assert found.differences == {128: 0.0}
    rows = {name: [1, 2, 3] for name in loader.load(out).encoding.columns}
    scores, _ = in_a_clean_environment(out, rows, tmp_path, "cuda")
    np.testing.assert_allclose(scores, loader.load(out).scores(rows), atol=1e-3)


def test_every_program_equals_the_evaluation_step(several):
    assert several[1].differences == {1: 0.0, 16: 0.0, BATCH: 0.0}


def test_a_model_that_is_dropped_frees_its_weights(several):
    model = loader.load(several[0])
    assert model.program(16) is model.program(16)
    model.encoding._finder(0)
    dropped = weakref.ref(model), weakref.ref(model.encoding)
    del model
    gc.collect()
    assert [found() for found in dropped] == [None, None]


def test_rows_are_split_padded_and_kept_in_order(trained, several):
    model = loader.load(several[0])
    assert model.batch_sizes == (1, 16, BATCH)
    inputs = model.encoding.inputs(columns(trained))
    logits = model.logits(inputs)
    assert np.array_equal(logits[:64], trained.logits[:64])  # two whole batches
    first = [x[:5] for x in inputs[:2]]
    rest = [np.concatenate([x[64:], y]) for x, y in zip(inputs[:2], first, strict=True)]
    padded = np.asarray(model.program(16)(loader.Inputs(*rest)))
    assert np.array_equal(logits[64:], padded[:11])
    assert model.logits(loader.Inputs(*(x[:0] for x in inputs[:2]))).shape == (0,)
    single = model.logits(loader.Inputs(*(x[3:4] for x in inputs[:2])))
    np.testing.assert_allclose(single, logits[3:4], atol=0.1)  # bf16 at one row


def test_weights_are_in_fp8_where_the_plan_says_so(several):
    out, found = several
    arrays = loader.read_arrays(out / "weights.safetensors")
    kinds = [x.dtype for name, x in arrays.items() if name.startswith("weight")]
    sites = [p.form.runs for p in found.programs if p.form.batch_size == BATCH][0]
    in_fp8 = sum("e4m3" in runs for runs in sites.values())
    assert in_fp8 == kinds.count(jnp.float8_e4m3fn) == 2
    assert found.weight_bytes["float8_e4m3fn"] > found.weight_bytes["float32"]


def test_programs_for_a_gpu_are_made_without_one(several):
    description = json.loads((several[0] / "model.json").read_text())
    for_gpu = [p for p in description["programs"] if p["platform"] == "cuda"]
    assert [p["batch_size"] for p in for_gpu] == [1, 16, BATCH]
    assert {p["compute_capability"] for p in for_gpu} == {None}


def test_a_plan_that_is_off_leaves_out_this_gpus_kernels(
    trained, tmp_path, monkeypatch
):
    monkeypatch.setattr(forms, "_device_of", lambda platform: HOPPER)
    devices = {}
    for plan in ("saved", "off"):
        options = {"batch_sizes": (16,), "platforms": ("cuda",), "plan": plan}
        found = export_run(trained.workdir, tmp_path / plan, **options)
        devices[plan] = found.programs[0].form.device
    assert devices == {"saved": HOPPER, "off": Device(platform="gpu")}


def test_another_platforms_folder_is_refused(trained, tmp_path):
    export_run(trained.workdir, tmp_path / "m", batch_sizes=(16,), platforms=("cuda",))
    with pytest.raises(ValueError, match="for cuda, and JAX runs on cpu: export it"):
        loader.load(tmp_path / "m")


def test_a_damaged_folder_is_refused(one, tmp_path):
    """Of every file: each of its ends and its middle changed, cut, gone."""
    folder = shutil.copytree(one[0], tmp_path / "model")
    names = json.loads((folder / "model.json").read_text())["files"]
    assert {"loader.py", "weights.safetensors", f"programs/cpu_{BATCH}.bin"} <= {*names}
    for path in (folder / name for name in (*names, "model.json")):
        content = path.read_bytes()
        damaged = [content[:-2], content[: len(content) // 2], b""]
        for at in (0, len(content) // 2, len(content) - 2):
            changed = bytes([content[at] ^ 1])
            damaged.append(content[:at] + changed + content[at + 1 :])
        for wrong in damaged:
            path.write_bytes(wrong)
            with pytest.raises(ValueError, match=f"{path.name} is damaged: restore it"):
                loader.load(folder)
        path.unlink()
        with pytest.raises(ValueError, match=f"{path.name}.* is missing"):
            loader.load(folder)
        path.write_bytes(content)
    assert loader.load(folder).tasks == ("label",)


def test_another_format_is_refused(one, tmp_path):
    folder = shutil.copytree(one[0], tmp_path / "model")
    value = json.loads((folder / "model.json").read_text())
    del value["digest"]
    value["format"] = 2
    value["digest"] = loader.digest_of(value)
    (folder / "model.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match="has format 2, and this loader reads 1: use"):
        loader.load(folder)


@pytest.mark.slow
def test_a_run_on_generated_clicks_takes_ids(tmp_path):
    config = runs.config(tmp_path / "run", eval_every=None, epochs=1)
    assert runs.train(config)[0] == 0
    found = export_run(
        tmp_path / "run", tmp_path / "m", batch_sizes=(8,), platforms=("cpu",)
    )
    assert found.differences == {8: 0.0}
    model = loader.load(tmp_path / "m")
    rows = {name: [1, 2, 3] for name in model.encoding.columns}
    assert model.scores(rows).shape == (3,)
    with pytest.raises(ValueError, match=r"'C4' holds '4', no integer in 0\.\.3"):
        model.scores(rows | {"C4": [0, 1, 4]})


def test_each_task_has_a_column_of_scores(tmp_path):
    schema = Schema(
        label="click",
        further_labels=("buy",),
        dense=("price",),
        categorical=("user", "item"),
        vocab_sizes=(9, 5),
    )
    trained = untrained(find_config("fp8_mmoe_tiny"), schema)
    made = (make_form(trained, "cpu", rows, DispatchPlan()) for rows in (2, 16))
    out = tmp_path / "model"
    found = write_model(trained, inputs_as_given(schema), made, out)
    assert found.differences == {2: 0.0, 16: 0.0}
    model = loader.load(out)
    rows = {"price": range(20), "user": [3] * 20, "item": [i % 5 for i in range(20)]}
    assert model.tasks == ("click", "buy")
    scores = model.scores(rows)
    assert scores.shape == (20, 2) and len(np.unique(scores, axis=0)) == 20
    assert model.scores({name: [] for name in rows}).shape == (0, 2)


def test_a_cross_network_is_fused_in_evaluation_and_export(tmp_path):
    config = find_config("fp8_dcnv2_tiny")
    model = config.model.clone(fused_wide=True, recipe="fp8_tensorwise_delayed")
    schema = schema_of(config.data)
    start = untrained(dataclasses.replace(config, model=model), schema)
    scales = jax.tree.map(jnp.ones_like, start.state.fp8)
    trained = start._replace(state=dataclasses.replace(start.state, fp8=scales))
    form = make_form(trained, "cpu", 32, DispatchPlan())
    spec = inputs_as_given(schema)
    found = write_model(trained, spec, iter([form]), tmp_path / "model")
    assert form.model.scales_initialized
    assert found.differences == {32: 0.0}
    apart = form._replace(model=nn.Planned(model))
    rows = loader.load(tmp_path / "model").encoding.blank(32)
    inputs = rows._replace(dense=np.ones_like(rows.dense))
    logits = evaluated(trained, form, inputs)
    assert not np.array_equal(logits, evaluated(trained, apart, inputs))


def test_the_loader_compiles_as_evaluations_do():
    assert loader.COMPILER_OPTIONS == INFERENCE_OPTIONS


@pytest.mark.parametrize(
    "options, said",
    [
        (["--batch-sizes", "0"], "--batch-sizes 0 must be 1 or more"),
        (["--platforms", "tpu"], "--platforms is 'tpu'"),
        (["--workdir", "gone"], "holds no run"),
    ],
)
def test_a_bad_command_is_one_sentence(trained, tmp_path, capsys, options, said):
    out = tmp_path / "model"
    arguments = ["--workdir", str(trained.workdir), "--out", str(out), *options]
    code = command.main(arguments)
    assert_refused((code, *capsys.readouterr()), said)
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_folder_and_says_what_is_in_it(trained, tmp_path, capsys):
    arguments = ["--workdir", str(trained.workdir), "--out", str(tmp_path / "model")]
    options = ["--batch-sizes", str(BATCH), "--platforms", "cpu", "--plan", "off"]
    assert command.main([*arguments, *options]) == 0
    said = capsys.readouterr().out
    assert "cpu 32: 2 of 4 sites in FP8" in said
    assert "32 rows: equal bit for bit to the run's evaluation step here." in said
    assert_refused((command.main(arguments), *capsys.readouterr()), "exists already")


def test_a_folder_scores_what_predict_does(trained, one):
    expected = loka_jax.load(trained.workdir).scores(csv.read_csv(trained.test))
    assert np.array_equal(loader.load(one[0]).scores(columns(trained)), expected)
