"""Every large configuration in FP8 builds; small ones of each data take steps."""

import dataclasses
import math

import jax
import pytest

from experiments import configs
from loka_jax.data import Position
from loka_jax.models import Mmoe
from loka_jax.train import build as build_lib
from loka_jax.train import metrics
from tests.support import train as support
from tests.support.configs import tiny
from tests.support.data import criteo_line

# One of each kind of data, in three families.
STEPPED = ("criteo_dcnv2", "frappe_wukong", "csv_dlrm")
OWN = {"label": "click", "categorical": ("user",), "dense": ("age",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a small file for each kind of data that needs one."""
    folder = tmp_path_factory.mktemp("data")
    fields = configs.get_config("frappe_dlrm").data.categorical
    files = {
        "criteo.txt": [criteo_line(str(i % 2), {1: str(i)}) for i in range(80)],
        "frappe.csv": [f"label,{','.join(fields)}\n"],
        "csv.csv": ["click,buy,user,age\n"],
        "assistments.csv": ["user,position,item,skill,correct\n"],
    }
    for i in range(80):
        files["frappe.csv"] += [f"{i % 2}{len(fields) * f',v{i % 7}'}\n"]
        files["csv.csv"] += [f"{i % 2},{i // 2 % 2},u{i % 7},{i}\n"]
        files["assistments.csv"] += [f"u{i % 7},{i},i{i % 9},s{i % 3},{i % 2}\n"]
    for name, lines in files.items():
        (folder / name).write_text("".join(lines))
    return folder


def small(config, folder):
    """Returns a configuration on little data."""
    if config.data.kind == "generated":
        sizes = dict(rows=support.DATA.rows, examples=256, eval_examples=64)
        optim = dataclasses.replace(config.optim, warmup_steps=0)
        data = dataclasses.replace(config.data, **sizes)
        return dataclasses.replace(config, data=data, optim=optim)
    if config.data.kind == "events":
        data = dataclasses.replace(config.data, examples=256, eval_examples=64)
        return dataclasses.replace(config, data=data)
    has_tasks = isinstance(config.model, Mmoe)
    kind = config.name.partition("_")[0]
    kind = "csv" if has_tasks or kind == "table" else kind
    own = OWN if kind == "csv" else {}
    own = own | ({"labels": ("click", "buy")} if has_tasks else {})
    path, cache = next(folder.glob(f"{kind}.*")), folder / "cache"
    data = dataclasses.replace(config.data, path=str(path), cache=str(cache), **own)
    return dataclasses.replace(config, data=data)


@pytest.fixture
def build(monkeypatch, folder):
    support.share_data(monkeypatch)
    return lambda config: build_lib.build(small(config, folder))


@pytest.mark.parametrize("name", configs.names())
def test_every_configuration_builds_and_lists_its_sites(name, build):
    run = build(configs.get_config(name))
    assert run.config.name == name
    num_tasks = len(run.splits.train.schema.labels)
    last = [site.path for site in run.sites if site.path != "first_order"][-1]
    assert last == ("head" if num_tasks == 1 else f"head_{num_tasks - 1}")
    assert run.total_steps >= 1
    assert any(site.is_fp8 for site in run.sites)


@pytest.mark.parametrize("name", STEPPED)
def test_a_small_form_of_each_kind_of_data_takes_two_steps(name, build):
    run = build(tiny(name))
    size = run.config.loop.batch_size
    state = run.init()
    for _ in range(2):
        batch = run.splits.train.batch(Position(0, 0, 0), size, shuffle=True)
        state = run.train_step()(state, jax.device_put(batch))
    assert (int(state.step), int(state.skipped)) == (2, 0)
    for task in metrics.split_tasks(state.metrics):
        assert math.isfinite(metrics.compute(task)["logloss"])
