"""What is exported for which platforms and sizes; a folder of a small model."""

import json
import shutil
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.data import DataConfig, Schema
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.export import export_run, folder, loader
from loka_jax.export.encoding import inputs_as_given
from loka_jax.export.folder import write_model
from loka_jax.export.programs import make_form
from loka_jax.models import Dlrm
from loka_jax.predict.trained import make_untrained
from loka_jax.train.config import DlrmConfig, EmbeddingConfig

SCHEMA = Schema(
    label="click",
    dense=("price",),
    categorical=("user", "item"),
    vocab_sizes=(9, 5),
)


STAND_INS = ("open_run", "read_trained", "plan_of", "make_form", "write_model", "plans")
STAND_INS += ("schema_of", "inputs_as_given", "load_encoding", "inputs_of", "model_of")
CLICKS = DataConfig()


def asked(batch_size=128, encoding=None, data=CLICKS, **options):
    """Returns what is called for options of `export_run`, by name, and its forms."""
    with mock.patch.multiple(folder, **dict.fromkeys(STAND_INS, mock.DEFAULT)) as found:
        seen = SimpleNamespace(**found)
        meta = {"encoding": encoding, "plan": "saved"}
        seen.open_run.return_value.saved.meta = meta
        loop = SimpleNamespace(batch_size=batch_size)
        for run in (seen.open_run.return_value, seen.read_trained.return_value):
            run.config = SimpleNamespace(data=data, loop=loop, model=None)
        seen.plan_of.side_effect = lambda plan, *_: plan
        seen.write_model.side_effect = lambda _, __, forms, *___, **____: [*forms]
        export_run("run", "model", **options)
    calls = seen.make_form.call_args_list
    seen.forms = [(*call.args[1:], call.kwargs["by_xla"]) for call in calls]
    return seen


def test_sizes_up_to_the_runs_own_are_exported_for_both_platforms():
    seen = asked()
    sizes = [(name, n) for name in ("cpu", "cuda") for n in (1, 16, 128)]
    assert seen.forms == [(*size, "auto", False) for size in sizes]
    sizes = [form[1] for form in asked(batch_size=600, platforms=("cpu",)).forms]
    assert sizes == [1, 16, 128, 600]
    name, saved, _, size = seen.plan_of.call_args_list[1].args
    assert (name, size) == ("auto", ("cpu", 16))
    assert saved is seen.plans.from_json.return_value
    assert seen.plans.from_json.call_args.args[0] == "saved"
    seen.open_run.assert_called_once_with("run", best=True)
    assert seen.read_trained.call_args.args[1] is seen.schema_of.return_value
    _, spec, _, out = seen.write_model.call_args.args
    assert (spec, out) == (seen.inputs_as_given.return_value, "model")


def test_asked_sizes_platforms_and_plans_are_exported():
    sizes = {"batch_sizes": (8, 2, 8), "platforms": ("cuda",)}
    seen = asked(encoding={"a": "digest"}, plan="off", **sizes)
    assert seen.forms == [("cuda", 2, "off", True), ("cuda", 8, "off", True)]
    schema = seen.load_encoding.return_value.schema
    assert seen.read_trained.call_args.args[1] is schema
    assert seen.write_model.call_args.args[1] is seen.inputs_of.return_value
    with pytest.raises(ValueError, match="--batch-sizes 0 must be 1 or more"):
        asked(batch_sizes=(4, 0))


def test_sizes_of_a_run_on_events_are_rows():
    log = DataConfig(kind="events", rows=(5, 21), history=6)
    own = asked(600, data=log, platforms=("cpu",))  # of 8 rows each
    assert [form[1] for form in own.forms] == [128, 512, 2048, 4864]
    (layout,) = own.inputs_as_given.call_args.args[1:]
    assert (layout.history, layout.contexts, layout.longest) == (6, 1, 8)
    assert own.model_of.call_args.kwargs == {"scores_candidates": True}
    few = asked(data=log, batch_sizes=(8, 2), platforms=("cpu",))
    assert [form[1] for form in few.forms] == [2, 8]
    with pytest.raises(ValueError, match="--batch-sizes 1 must be 2 or more"):
        asked(data=log, batch_sizes=(8, 1))
    with pytest.raises(ValueError, match="7 are fewer rows than the 8 of the longest"):
        asked(data=log, batch_sizes=(2, 7))


def test_a_run_on_lists_without_labels_is_refused():
    lists = {"lists": ("item=items", "when=times"), "time": "when", "label": "click"}
    data = DataConfig(kind="table", categorical=("item",), **lists)
    with pytest.raises(ValueError, match="tells events from candidates by their label"):
        asked(encoding={"a": "digest"}, data=data)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder of a small model, and what was written."""
    model = Dlrm(bottom_mlp=(16,), top_mlp=(16,), recipe="fp8_tensorwise")
    config = DlrmConfig(name="x", model=model, embedding=EmbeddingConfig(dim=16))
    trained = make_untrained(config, SCHEMA)
    made = iter([make_form(trained, "cpu", 16, DispatchPlan())])
    out = tmp_path_factory.mktemp("exported") / "model"
    return out, write_model(trained, inputs_as_given(SCHEMA), made, out)


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
    sizes = Counter()
    for x in weights.values():
        sizes[x.dtype.name] += x.nbytes
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
        middle, changed = len(content) // 2, bytearray(content)
        changed[middle] ^= 1
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
    value |= {"format": 1, "digest": loader.digest_of(value | {"format": 1})}
    (copy / "model.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match="has format 1, and this loader reads 4: use"):
        loader.load(copy)
