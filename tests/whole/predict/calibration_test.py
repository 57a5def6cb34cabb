"""A calibrated run, and what it exports, score rows as its evaluation did."""

import dataclasses

import numpy as np
import pytest
from pyarrow import csv

import loka_jax
from loka_jax.export import export_run, loader
from loka_jax.models import Mmoe
from loka_jax.predict import evaluate_files
from loka_jax.train.calibration import CALIBRATION
from loka_jax.train.config import MmoeConfig
from loka_jax.train.scores import read_scores
from tests.support import predict
from tests.support import train as support
from tests.support.predict import sigmoid

pytest.importorskip("safetensors")
BATCH = 32  # of the run
MODEL = Mmoe(
    bottom_mlp=(16,), expert_mlp=(16,), tower_mlp=(16,), num_tasks=2, num_experts=2
)


def two_labels(folder):
    """Returns a run of two labels, not yet calibrated."""
    for name in ("train.csv", "test.csv"):
        table = csv.read_csv(folder / name)
        labels = np.asarray(table["label"])
        cheap = np.asarray(table["price"]) < 1
        both = table.append_column("buy", [(labels & cheap).astype(int)])
        csv.write_csv(both, folder / name)
    like = predict.config(folder, test=str(folder / "test.csv"))
    fields = {f.name: getattr(like, f.name) for f in dataclasses.fields(like)}
    data = dataclasses.replace(like.data, label="label", labels=("label", "buy"))
    fields |= {"model": MODEL, "data": data}
    return MmoeConfig(**fields)


@pytest.mark.parametrize("tasks", [1, 2])
def test_one_line_for_all_who_score(tmp_path, tasks):
    predict.write_both(tmp_path)
    test = str(tmp_path / "test.csv")
    config = predict.config(tmp_path, test=test) if tasks == 1 else two_labels(tmp_path)
    assert support.train(config)[0] == 0
    workdir = config.run.workdir
    plain = loka_jax.load(workdir)
    # The line is fitted anew, though all steps are taken.
    again = dataclasses.replace(config.run, resume=True)
    code, said = support.train(dataclasses.replace(config, run=again, calibrate=True))
    assert code == 0 and "before its calibration by validation rows" in said
    logits = np.stack([x.logits for x in read_scores(workdir).values()], axis=1)
    logits = logits.reshape(-1) if tasks == 1 else logits
    table, model = csv.read_csv(test), loka_jax.load(workdir)
    scores = model.scores(table)
    assert np.array_equal(scores, sigmoid(logits))
    assert not np.array_equal(scores, plain.scores(table))
    out, options = tmp_path / "model", dict(batch_sizes=(BATCH,), platforms=("cpu",))
    assert export_run(workdir, out, **options).differences == {BATCH: 0.0}
    assert np.array_equal(loader.load(out).scores(table.to_pydict()), scores)
    found = evaluate_files(model, test).overall
    final = support.summary(workdir)["final_eval"]
    numbers = final.get("tasks", {"label": final})
    before = final["uncalibrated"].get("tasks", {"label": final["uncalibrated"]})
    for name, own in found.items():
        assert own["logloss"] == pytest.approx(numbers[name]["logloss"], rel=1e-5)
        assert own["auc"] == before[name]["auc"] == numbers[name]["auc"]
        assert own["logloss"] != pytest.approx(before[name]["logloss"], rel=1e-5)
    assert "NE before its calibration" in (workdir / "report.html").read_text()
    (workdir / CALIBRATION).unlink()  # as before its end
    with pytest.raises(ValueError, match="is to be calibrated at its end"):
        loka_jax.load(workdir)
