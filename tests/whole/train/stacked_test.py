"""A model whose layers are stacked by `nn.scan` is observed and looked at as others."""

import dataclasses
import math

import numpy as np

from loka_jax.models import own_model
from loka_jax.recipe import OPERANDS
from loka_jax.train.config import OwnConfig, ProbeOptions
from loka_jax.train.watch.host_state import Progress
from tests.support import train as support
from tests.support.own_models import Scanned
from tests.support.recorded import newest

SITE = "Scanned_0/Scan_Step_0/Block_0/Dense_0"


def test_statistics_looks_and_lines_are_of_all_layers(tmp_path):
    like = support.config(tmp_path / "run", max_steps=8, eval_every=8, log_every=4)
    fields = {f.name: getattr(like, f.name) for f in dataclasses.fields(like)}
    fields["model"] = own_model(Scanned(), recipe="fp8_tensorwise_delayed")
    fields["probe"] = ProbeOptions(every=2)
    code, said = support.train(OwnConfig(**fields))
    assert code == 0, said
    for name in ("amaxes", "scales"):
        line = support.lines(tmp_path / "run", f"{name}.jsonl")[-1]
        values = [line[f"{SITE}/{operand}"] for operand in OPERANDS]
        assert all(0 < x < math.inf for x in values), (name, values)
    saved, _ = newest(tmp_path / "run" / "checkpoints")
    drift = Progress.from_json(saved.meta["progress"]).drift[SITE]
    assert drift.looks == 3 and np.all(np.isfinite(np.array(drift.usual, float)[:, 2:]))
