"""Every registered configuration builds, and every tiny one takes steps."""

import dataclasses
import math

import jax
import pytest

from experiments import configs
from loka_jax.data import Position
from loka_jax.train import build as build_lib
from loka_jax.train import metrics
from tests.support import drills, slow_except
from tests.support import train as support
from tests.support.data import criteo_line

FRAPPE = configs.get_config("frappe_dlrm").data.categorical
TINY = [name for name in configs.names() if name.endswith("_tiny")]
QUICK = ("fp8_dcnv2_tiny",)
# The same data in another model, which takes steps in another family.
AGAIN = (
    *("criteo_dcnv2_tiny", "frappe_dcnv2_tiny", "fp8_dlrm_tiny"),
    *("criteo_wukong_tiny", "frappe_wukong_tiny"),
    *("criteo_dhen_tiny", "frappe_dhen_tiny"),
    *("fp8_dhen_dlrm_tiny", "fp8_mlperf_dcnv2_tiny"),
)
ONCE = [name for name in TINY if name not in AGAIN]


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
        data = dataclasses.replace(
            config.data, examples=256, eval_examples=64, rows=support.DATA.rows
        )
        optim = dataclasses.replace(config.optim, warmup_steps=0)
        return dataclasses.replace(config, data=data, optim=optim)
    has_tasks = hasattr(config.model, "num_tasks")
    kind = "csv" if has_tasks else name.partition("_")[0]
    path = next(folder.glob(f"{kind}.*"))
    data = dataclasses.replace(config.data, path=str(path), cache=str(folder / "cache"))
    if kind == "csv":
        data = dataclasses.replace(
            data,
            label="click",
            labels=("click", "buy") if has_tasks else (),
            categorical=("user",),
            dense=("age",),
        )
    return dataclasses.replace(config, data=data)


@pytest.fixture
def build(monkeypatch, folder):
    support.share_data(monkeypatch)
    return lambda name: build_lib.build(small(name, folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", configs.names())
def test_every_configuration_builds_and_lists_its_sites(name, build):
    run = build(name)
    assert run.config.name == name
    num_tasks = len(run.splits.train.schema.labels)
    assert run.sites[-1].path == ("head" if num_tasks == 1 else f"head_{num_tasks - 1}")
    assert run.total_steps >= 1
    wants_fp8 = not name.startswith("bf16")
    assert any(site.is_fp8 for site in run.sites) == wants_fp8


@pytest.mark.parametrize("name", [*slow_except(ONCE, *QUICK), *drills(AGAIN)])
def test_every_tiny_configuration_takes_two_steps(name, build):
    run = build(name)
    size = run.config.loop.batch_size
    state = run.init()
    for _ in range(2):
        batch = run.splits.train.batch(Position(0, 0, 0), size, shuffle=True)
        state = run.first_step(state, jax.device_put(batch))
    assert (int(state.step), int(state.skipped)) == (2, 0)
    for task in metrics.split_tasks(state.metrics):
        assert math.isfinite(metrics.compute(task)["logloss"])


def test_every_family_has_a_tiny_variant():
    families = {name.partition("_")[0] for name in configs.names()}
    assert {name.partition("_")[0] for name in TINY} == families


def test_an_unknown_name_suggests_the_nearest_and_lists_all():
    with pytest.raises(ValueError) as error:
        configs.get_config("fp8_dlmr")
    assert "unknown configuration 'fp8_dlmr': did you mean 'fp8_dlrm'?" in str(
        error.value
    )
    assert set(configs.names()) < set(configs.all_names())
    assert all(name in str(error.value) for name in configs.all_names())


def test_a_name_like_no_other_is_only_listed():
    with pytest.raises(ValueError, match="^unknown configuration 'zzz': Use one of "):
        configs.get_config("zzz")
