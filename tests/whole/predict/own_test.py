"""A model of a user's own is trained, scored, exported and resumed as others are."""

import dataclasses

import numpy as np
import pytest
from pyarrow import csv

import loka_jax
from loka_jax.export import export_run, loader
from loka_jax.models import own_model
from loka_jax.optim import OptimConfig
from loka_jax.predict import evaluate_files
from loka_jax.train.config import OwnConfig
from tests.support import predict
from tests.support import train as support
from tests.support.own_models import Nnx, Plain
from tests.support.predict import sigmoid

pytest.importorskip("safetensors")
BATCH = 32  # of the run
FUNCTIONS = "tests.support.own_functions"


def own(folder, model, **loop):
    """Returns a run of a model, loss and metric of one's own."""
    like = predict.config(folder, test=str(folder / "test.csv"))
    fields = {f.name: getattr(like, f.name) for f in dataclasses.fields(like)}
    fields["model"] = own_model(model, recipe="fp8_tensorwise_delayed")
    fields["optim"] = dataclasses.replace(like.optim, loss=f"{FUNCTIONS}:focal")
    fields["metrics"] = (f"brier={FUNCTIONS}:brier",)
    fields["loop"] = dataclasses.replace(like.loop, **loop)
    return OwnConfig(**fields)


@pytest.mark.parametrize("made", [Plain(), Nnx], ids=["linen", "nnx"])
def test_a_model_of_ones_own_is_scored_exported_and_resumed(tmp_path, made):
    predict.write_both(tmp_path)
    run = predict.train(own(tmp_path, made))
    table = csv.read_csv(run.test).drop_columns(["label"])
    model = loka_jax.load(run.workdir)
    assert model.config.model == own(tmp_path, made).model
    assert np.array_equal(model.scores(table), sigmoid(run.logits))
    out, options = tmp_path / "model", dict(batch_sizes=(BATCH,), platforms=("cpu",))
    assert export_run(run.workdir, out, **options).differences == {BATCH: 0.0}
    scores = loader.load(out).scores(table.to_pydict())
    assert np.array_equal(scores, sigmoid(run.logits))

    found = evaluate_files(model, run.test).overall["label"]["metrics"]
    scores, labels = sigmoid(run.logits), np.asarray(csv.read_csv(run.test)["label"])
    want = {"brier": pytest.approx(np.mean((scores - labels) ** 2), rel=1e-5)}
    assert found == run.summary["final_eval"]["metrics"] == want

    more = own(tmp_path, made, epochs=2)
    options = dataclasses.replace(more.run, resume=True)
    code, said = support.train(dataclasses.replace(more, run=options))
    assert code == 0 and "brier 0." in said
    other = dataclasses.replace(more, run=options, optim=OptimConfig())
    with pytest.raises(ValueError, match="--optim.loss"):
        support.train(other)
    assert support.summary(run.workdir)["steps"] > run.summary["steps"]
