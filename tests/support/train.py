"""A run small enough to train many times, and what tells two runs apart."""

import dataclasses
import functools
import hashlib
import io
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from loka_jax.data import DataConfig, open_data
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.table import MEASURES, Entry, Table
from loka_jax.measure.intervals import Interval
from loka_jax.models import Dlrm
from loka_jax.optim import OptimConfig
from loka_jax.recipe import ROLES
from loka_jax.site import BF16
from loka_jax.train import build as build_lib
from loka_jax.train import session
from loka_jax.train.config import (
    Config,
    DlrmConfig,
    EmbeddingConfig,
    LoopConfig,
    RunOptions,
)
from loka_jax.train.watch import looks

DATA = DataConfig(examples=320, eval_examples=64, rows=(20, 10, 5, 4), signal=2.5)
MODEL = Dlrm(
    bottom_mlp=(16,), top_mlp=(16,), recipe="fp8_tensorwise_delayed", dropout_rate=0.1
)
OPTIM = OptimConfig(lr=0.01, rows_lr=0.1, warmup_steps=2)
LOOP = LoopConfig(batch_size=32, epochs=2, eval_every=5, log_every=3)
# Of a line: what differs between a run and the same run resumed.
MEASURED = ("seconds", "compile_seconds", "examples_per_second")
MEASURED += ("device_peak_bytes", "host_bytes")
ROW = "xla fp8_rowwise/bf16/fp8_rowwise"  # heads read the sites


def config(workdir=None, *, seed=0, patience=None, data=None, **loop):
    """Returns a run of 20 steps; `loop` overrides LOOP."""
    resume = loop.pop("resume", False)
    return DlrmConfig(
        name="small",
        model=MODEL,
        seed=seed,
        data=data or DATA,
        embedding=EmbeddingConfig(dim=16),
        optim=dataclasses.replace(OPTIM, plateau_patience=patience),
        loop=dataclasses.replace(LOOP, **loop),
        run=RunOptions(workdir=workdir, resume=resume),
    )


def train(config: Config) -> tuple[int, str]:
    """Trains in this process; returns the exit code and what was printed."""
    out = io.StringIO()
    done = session.train(config, [], Console(file=out, width=120, soft_wrap=True))
    return done.exit_code, out.getvalue()


_open_data = functools.cache(lambda data, seed: open_data(data, seed=seed))
_made: dict = {}


def build(config, saved=None, say=print, base=None):
    """Returns the run, with the steps and the start of an earlier one of its kind."""
    run = build_lib.build(config, saved, say, base)
    optim = dataclasses.replace(
        config.optim, plateau_patience=None, plateau_factor=0.1, best_by="ne"
    )
    steps = None if optim.decay == "constant" else run.total_steps
    stack = run.placement.tables
    sizes = (stack.rows, stack.dim, config.loop.batch_size, steps)
    model = (repr(config.model), run.plan.choices)
    key = (model, repr(optim), sizes, config.seed, run.config.probe, repr(config.mesh))
    if key not in _made:
        start = run.init()
        _made[key] = {
            "init": lambda: jax.tree.map(jnp.copy, start),
            "programs": run.programs,
        }
    vars(run).update(_made[key])
    return run


def write_table(path, header=None, *, source=None, bf16_us=2.0, fp8_us=1.0):
    """Writes a table where `ROW` is twice as fast, its errors of `source`.

    They are those of `config()` by default.
    """
    measures = {name: Interval(0.03, 0.03, 0.03) for name in MEASURES}
    errors = {role: {"fp8_rowwise": measures} for role in ROLES}
    run = build_lib.build(config())
    sites, source = run.sites, source or run.source
    entry = Entry(
        {"training": {BF16.name: bf16_us, ROW: fp8_us}},
        {f"{source} {site.path}": errors for site in sites},
    )
    entries = {table_key(site.spec): entry for site in sites}
    tables.write(path, Table(header or header_here(), entries))
    return path


def plant_drift(monkeypatch, path, since, until=10**9):
    """Lets lhs of a site, by default the last, look 512 times as large."""
    plain = looks.look_step

    def planted(run, recipes):
        look, site = plain(run, recipes), path or max(recipes)

        def look_and_plant(state, batch):
            found = look(state, batch)
            if since <= int(state.step) < until:
                found[site] = found[site].at[0, 2].add(9.0)
            return found

        return mock.Mock(side_effect=look_and_plant, has_run=True)

    monkeypatch.setattr(looks, "look_step", planted)


def share_data(monkeypatch):
    """Opens each data set once in a test session."""
    opened = lambda data, *, seed, base: _open_data(data, seed)  # noqa: E731
    monkeypatch.setattr(build_lib, "open_data", opened)


def share_programs(monkeypatch):
    """Shares compiled steps, and writes no page."""
    monkeypatch.setattr(session, "build", build)
    monkeypatch.setattr(session, "write_run_page", lambda path, run: path)


def share_steps(monkeypatch):
    """Shares compiled steps and opened data, and writes no page."""
    share_data(monkeypatch)
    share_programs(monkeypatch)


def lines(workdir, name="metrics.jsonl"):
    """Returns the lines of a run without what was measured on the machine."""
    found = [json.loads(text) for text in (workdir / name).read_text().splitlines()]
    return without(MEASURED, found)


def without(names, value):
    """Returns JSON values without the fields of some names."""
    if isinstance(value, dict):
        return {k: without(names, v) for k, v in value.items() if k not in names}
    if isinstance(value, list):
        return [without(names, v) for v in value]
    return value


def summary(workdir):
    """Returns summary.json."""
    return json.loads((workdir / "summary.json").read_text())


def digest(tree) -> str:
    """Returns a digest of all leaves with their paths, dtypes and shapes."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        found.update(repr((path, array.dtype, array.shape)).encode())
        found.update(array.tobytes())
    return found.hexdigest()
