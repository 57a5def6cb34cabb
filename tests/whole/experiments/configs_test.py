"""Every large configuration in FP8 builds; tiny ones of each data take steps."""

import dataclasses
import math

import jax
import pytest

from experiments import configs
from loka_jax.data import Position
from loka_jax.train import build as build_lib
from loka_jax.train import metrics
from tests.support import train as support
from tests.support.data import criteo_line

FRAPPE = configs.get_config("frappe_dlrm").data.categorical
# One of each kind of data, in three families.
STEPPED = ("criteo_dcnv2_tiny", "frappe_wukong_tiny", "csv_dlrm_tiny")
# Baselines differ from their models in the recipe alone.
BUILT = [
    name
    for name in configs.names()
    if not name.endswith("_tiny") and not name.startswith("bf16")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a small file for each kind of data that needs one."""
    folder = tmp_path_factory.mktemp("data")
    dense = ({1: str(i), 2: str(i % 5)} for i in range(80))
    lines = (criteo_line(str(i % 2), numbers) for i, numbers in enumerate(dense))
    (folder / "criteo.txt").write_text("".join(lines))
    rows = (",".join([str(i % 2), *(f"v{i % 7}" for _ in FRAPPE)]) for i in range(80))
    (folder / "frappe.csv").write_text("\n".join([f"label,{','.join(FRAPPE)}", *rows]))
    rows = (f"{i % 2},{i // 2 % 2},u{i % 7},{i}" for i in range(80))
    (folder / "csv.csv").write_text("\n".join(["click,buy,user,age", *rows]))
    return folder


def small(name, folder):
    """Returns the configuration `name` on little data."""
    config = configs.get_config(name)
    if config.data.kind == "generated":
        data, small = config.data, {"examples": 256, "eval_examples": 64}
        data = dataclasses.replace(data, rows=support.DATA.rows, **small)
        optim = dataclasses.replace(config.optim, warmup_steps=0)
        return dataclasses.replace(config, data=data, optim=optim)
    has_tasks = hasattr(config.model, "num_tasks")
    kind = "csv" if has_tasks else name.partition("_")[0]
    own = {}
    if kind == "csv":
        labels = ("click", "buy") if has_tasks else ()
        own = {"label": "click", "labels": labels}
        own |= {"categorical": ("user",), "dense": ("age",)}
    path, cache = next(folder.glob(f"{kind}.*")), folder / "cache"
    data = dataclasses.replace(config.data, path=str(path), cache=str(cache), **own)
    return dataclasses.replace(config, data=data)


@pytest.fixture
def build(monkeypatch, folder):
    support.share_data(monkeypatch)
    return lambda name: build_lib.build(small(name, folder))


@pytest.mark.parametrize("name", BUILT)
def test_every_configuration_builds_and_lists_its_sites(name, build):
    run = build(name)
    assert run.config.name == name
    num_tasks = len(run.splits.train.schema.labels)
    assert run.sites[-1].path == ("head" if num_tasks == 1 else f"head_{num_tasks - 1}")
    assert run.total_steps >= 1
    assert any(site.is_fp8 for site in run.sites)


@pytest.mark.parametrize("name", STEPPED)
def test_a_tiny_configuration_of_each_kind_of_data_takes_two_steps(name, build):
    run = build(name)
    size = run.config.loop.batch_size
    state = run.init()
    for _ in range(2):
        batch = run.splits.train.batch(Position(0, 0, 0), size, shuffle=True)
        state = run.first_step(state, jax.device_put(batch))
    assert (int(state.step), int(state.skipped)) == (2, 0)
    for task in metrics.split_tasks(state.metrics):
        assert math.isfinite(metrics.compute(task)["logloss"])
