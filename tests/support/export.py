"""Models without training to export; exported folders where only jax is installed."""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np

from experiments.configs import find_config
from loka_jax.data.generated import schema_of
from loka_jax.predict import trained
from loka_jax.train.model import model_of
from loka_jax.train.placement import Placement
from loka_jax.train.state import TrainState

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


@functools.cache
def blank_dlrm(**options) -> trained.Trained:
    """Returns a DLRM of small tables and of zeros, two layers of which have kernels."""
    config = find_config("fp8_dlrm")
    data = dataclasses.replace(config.data, rows=(5, 4, 3))
    model = config.model.clone(**options)
    config = dataclasses.replace(config, data=data, model=model)
    schema = schema_of(data)
    net = model_of(config, schema)
    shapes = jax.eval_shape(lambda: vars(trained.initial_state(config, net, schema)))
    # Put on the device, not made there: nothing is compiled.
    zeros = jax.device_put(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))
    place = Placement(net.tables)
    return trained.Trained(config, schema, net, TrainState(**zeros), 0, place)
