"""What is exported for which platforms and sizes; a folder of a small model."""

import json
import shutil
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.data import Schema
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.export import export_run, folder, loader
from loka_jax.export.encoding import inputs_as_given
from loka_jax.export.folder import write_model
from loka_jax.export.forms import make_form
from loka_jax.models import Dlrm
from loka_jax.predict.trained import untrained
from loka_jax.train.config import DlrmConfig, EmbeddingConfig

SCHEMA = Schema(
    label="click",
    dense=("price",),
    categorical=("user", "item"),
    vocab_sizes=(9, 5),
)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Returns a function from options of `export_run` to what it asks for."""

    def asked(batch_size=128, encoding=None, **options):
        seen = SimpleNamespace(plans=[], forms=[])
        meta = {"encoding": encoding, "plan": "saved"}
        loop = SimpleNamespace(batch_size=batch_size)
        config = SimpleNamespace(data="data", loop=loop)
        network = SimpleNamespace(list_sites=lambda plan: "sites")
        trained = SimpleNamespace(config=config, network=network)
        source = SimpleNamespace(
            config=config, saved=SimpleNamespace(meta=meta), encoding=lambda: "folder"
        )

        def open_run(workdir, best):
            seen.opened = workdir, best
            return source

        def read_trained(source, schema):
            seen.schema = schema
            return trained

        def plan_of(*of):
            seen.plans.append(of[:2] + of[3:4])
            return of[0]

        def write_model(trained, spec, forms, out, say):
            seen.written = spec, out, len([*forms])
            return seen

        encoded = SimpleNamespace(schema="of the encoding")
        stand_ins = {
            "open_run": open_run,
            "read_trained": read_trained,
            "plan_of": plan_of,
            "make_form": lambda trained, *of, by_xla: seen.forms.append((*of, by_xla)),
            "write_model": write_model,
            "schema_of": lambda data: f"of {data}",
            "inputs_as_given": lambda schema: "as given",
            "load_encoding": lambda folder: encoded,
            "inputs_of": lambda encoding: f"inputs {encoding.schema}",
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(folder, name, stand_in)
        from_json = lambda plan, sites, what: (plan, sites)  # noqa: E731
        monkeypatch.setattr(folder.plans, "from_json", from_json)
        return export_run(tmp_path / "run", tmp_path / "model", **options)

    return asked


def test_sizes_up_to_the_runs_own_are_exported_for_both_platforms(asked, tmp_path):
    seen = asked()
    sizes = [form[:2] for form in seen.forms]
    assert sizes == [(name, n) for name in ("cpu", "cuda") for n in (1, 16, 128)]
    sizes = [form[1] for form in asked(batch_size=600, platforms=("cpu",)).forms]
    assert sizes == [1, 16, 128, 600]
    assert {(plan, by_xla) for *_, plan, by_xla in seen.forms} == {("auto", False)}
    assert seen.plans[1] == ("auto", ("saved", "sites"), ("cpu", 16))
    assert seen.opened == (tmp_path / "run", True)  # the best state
    assert seen.schema == "of data"
    assert seen.written == ("as given", tmp_path / "model", 6)


def test_asked_sizes_platforms_and_plans_are_exported(asked):
    sizes = {"batch_sizes": (8, 2, 8), "platforms": ("cuda",)}
    seen = asked(encoding={"a": "digest"}, plan="off", **sizes)
    assert seen.forms == [("cuda", 2, "off", True), ("cuda", 8, "off", True)]
    assert seen.schema == "of the encoding"
    assert seen.written[0] == "inputs of the encoding"
    with pytest.raises(ValueError, match="--batch-sizes 0 must be 1 or more"):
        asked(batch_sizes=(4, 0))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder of a small model, and what was written."""
    model = Dlrm(bottom_mlp=(16,), top_mlp=(16,), recipe="fp8_tensorwise")
    config = DlrmConfig(name="x", model=model, embedding=EmbeddingConfig(dim=16))
    trained = untrained(config, SCHEMA)
    made = iter([make_form(trained, "cpu", 16, DispatchPlan())])
    out = tmp_path_factory.mktemp("exported") / "model"
    return out, write_model(trained, inputs_as_given(SCHEMA), made, out, say=print)


def test_a_program_equals_the_evaluation_step_and_refuses_other_ids(exported):
    out, found = exported
    assert found.differences == {16: 0.0}
    model = loader.load(out)
    assert (model.tasks, model.batch_sizes) == (("click",), (16,))
    rows = {"price": range(20), "user": [3] * 20, "item": [i % 5 for i in range(20)]}
    scores = model.scores(rows)
    assert scores.shape == (20,) and len(np.unique(scores)) == 20
    with pytest.raises(ValueError, match=r"'item' holds '5', no integer in 0\.\.4"):
        model.scores({"price": [1], "user": [3], "item": [5]})


def test_weights_are_in_fp8_where_the_plan_says_so_and_shared(exported):
    out, found = exported
    arrays = loader.read_arrays(out / "weights.safetensors")
    weights = {k: x for k, x in arrays.items() if k.startswith("weight")}
    in_fp8 = [x for x in weights.values() if x.dtype == jnp.float8_e4m3fn]
    runs = found.programs[0].form.runs.values()
    assert len(in_fp8) == sum("e4m3" in text for text in runs) > 0
    sizes = {}
    for x in weights.values():
        sizes[x.dtype.name] = sizes.get(x.dtype.name, 0) + x.nbytes
    assert found.weight_bytes == sizes  # tables apart
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert found.num_bytes == total
    description = json.loads((out / "model.json").read_text())
    (program,) = description["programs"]
    assert {*program["weights"]} == {*weights} and program["batch_size"] == 16


def test_a_damaged_folder_is_refused(exported, tmp_path):
    copy = shutil.copytree(exported[0], tmp_path / "model")
    names = json.loads((copy / "model.json").read_text())["files"]
    assert {"loader.py", "weights.safetensors", "programs/cpu_16.bin"} <= {*names}
    for path in (copy / name for name in (*names, "model.json")):
        content = path.read_bytes()
        middle = len(content) // 2
        changed = bytes([content[middle] ^ 1])
        changed = content[:middle] + changed + content[middle + 1 :]
        for wrong in (content[:middle], b"", changed):
            path.write_bytes(wrong)
            with pytest.raises(ValueError, match=f"{path.name} is damaged: restore it"):
                loader.load(copy)
        path.unlink()
        with pytest.raises(ValueError, match=f"{path.name}.* is missing"):
            loader.load(copy)
        path.write_bytes(content)
    value = json.loads((copy / "model.json").read_text())
    del value["digest"]
    value["format"] = 2
    value["digest"] = loader.digest_of(value)
    (copy / "model.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match="has format 2, and this loader reads 1: use"):
        loader.load(copy)
