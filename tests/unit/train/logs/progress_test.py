"""What a person sees: data and sites before training, numbers during it."""

import dataclasses
import io
import itertools
import re
import time

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from experiments.configs import get_config
from loka_jax import nn
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.recipe import RECIPES
from loka_jax.site import BF16
from loka_jax.terminal import printable
from loka_jax.train.config import LoopConfig
from loka_jax.train.logs import progress
from loka_jax.train.logs.column_table import print_columns
from loka_jax.train.logs.progress import (
    TrainingProgress,
    print_data,
    print_plan,
    print_sites,
)

LINE = {"loss": 0.5, "ne": None, "examples_per_second": 12345.6, "skipped_steps": 2}


def printed(show, *args, width=100, terminal=False) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=width, soft_wrap=True, force_terminal=terminal, highlight=False
    )
    show(console, *args)
    return out.getvalue()


def sites_of(recipe, config="fp8_dlrm", batch=8192, fields=26):
    model = get_config(config).model.clone(recipe=recipe)
    shapes = ((batch, 13), (batch, fields, 16))
    return nn.list_sites(model, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


def test_a_run_that_has_ended_says_which_option_continues_it():
    loop = LoopConfig(epochs=2, max_steps=8)
    assert progress.resuming(4, 8, loop) == "Resuming at step 4."
    assert "step 8, the last: raise --loop.max-steps " in progress.resuming(8, 8, loop)
    assert "raise --loop.epochs " in progress.resuming(6, 6, loop)
    assert "raise --loop.max-steps " in progress.resuming(9, 8, loop)


@pytest.mark.parametrize("config", ["fp8_dlrm", "fp8_dcnv2", "criteo_dlrm"])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_the_table_of_sites_fits_100_columns_whole(recipe, config):
    sites = sites_of(recipe, config)
    text = printed(print_sites, sites)
    table, _, _ = text.partition("No fused kernel")
    assert max(map(len, table.splitlines())) <= 100
    assert "…" not in text
    for site in sites:
        row = site.as_row()
        sizes = f"{row['m']} x {row['k']} x {row['n']}"
        texts = (site.path, sizes, row["fwd"], row["drhs"])
        assert all(part in text for part in texts), site


def test_the_table_says_what_runs_for_each_role_and_why_not_fp8():
    sites = sites_of("fp8_tensorwise_delayed_bf16_drhs")
    text = printed(print_sites, sites, width=120)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "Sites, recipe fp8_tensorwise_delayed_bf16_drhs" in rows
    why = "k=13 is too far below a multiple of 16"
    assert f"bottom_mlp/dense_0 8192 x 13 x 64 all xla bf16 {why}" in rows
    both = "top_mlp/dense_0 8192 x 384 x 256 fwd, dlhs xla fp8 e4m3 tensorwise"
    assert rows[rows.index(both) + 1] == "drhs xla bf16"
    assert "3 of 5 sites in FP8." in rows
    sites = "bottom_mlp/dense_1, top_mlp/dense_0, top_mlp/dense_1"
    assert rows[-1] == f"No fused kernel at {sites}: no Hopper GPU."


def test_roles_that_run_alike_share_a_line():
    text = printed(print_sites, sites_of("fp8_rowwise"))
    assert text.count("all    xla fp8 e4m3 rowwise") == 3


def test_data_is_described_by_sizes_rule_and_what_was_mended():
    report = {
        "examples": {"train": 1234, "valid": 10},
        "split_rule": "rows by hash",
        "notes": ["Weighted by 'w'."],
        "totals": {"missing": 5, "nan": 0},
        "bad_rows": {"count": 2, "samples": []},
    }
    assert printed(print_data, report).splitlines() == [
        "Examples: 1,234 train, 10 valid; rows by hash.",
        "Weighted by 'w'.",
        "Irregular values, handled as configured: 5 missing, 2 bad rows.",
    ]


def test_columns_are_described_by_their_tables_and_warnings():
    facts = {"rows": 11, "values": 9, "most_frequent": [["a", 1200], ["b", 3]]}
    report = {
        "categorical": {
            "user": facts | {"warning": None},
            HOSTILE: facts | {"values": None, "warning": f"{HOSTILE} is odd."},
        }
    }

    def show(console):
        print_columns(console, report, dict.fromkeys(report["categorical"], 16))

    lines = printed(show, width=200).splitlines()
    (user,) = (line.split() for line in lines if line.startswith(" user"))
    assert user == ["user", "9", "11", "176", "a", "(1,200),", "b", "(3)"]
    assert lines[-2] == "22 rows x 16 = 352 parameters in tables."
    assert lines[-1] == f"Warning: {printable(f'{HOSTILE} is odd.')}"
    assert any("hashed" in line for line in lines)


def test_data_without_defects_says_nothing_of_them():
    report = {"examples": {"train": 1}, "split_rule": "x"}
    assert printed(print_data, report) == "Examples: 1 train; x.\n"


def test_a_log_file_gets_a_line_every_ten_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def show(console):
        with TrainingProgress(console) as display:
            display.begin(1000, 0)
            for step in range(1, 8):
                now[0] += 4.0
                display.step(step)
                display.numbers(step, LINE)

    assert printed(show).splitlines() == [
        f"step {step} of 1,000  loss 0.5000  NE n/a  12,346 examples/s  skipped 2"
        for step in (3, 6)
    ]


def test_a_terminal_gets_a_bar_with_loss_ne_rate_and_time_left():
    def show(console):
        with TrainingProgress(console) as display:
            display.begin(1000, 0)
            display.numbers(500, LINE | {"ne": 0.9, "skipped_steps": 0})

    text = printed(show, terminal=True, width=120)
    assert "500/1000" in text
    assert "loss 0.5000  NE 0.9000  12,346 examples/s" in text
    assert ":" in text.split("examples/s")[-1]  # the time left


def lines_of(text: str) -> list[str]:
    """Returns what was drawn, without what moves the cursor or sets a colour."""
    return re.split("[\r\n]+", re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text))


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_bar_is_one_line_with_room_for_the_echo_of_ctrl_c(width):
    def show(console):
        with TrainingProgress(console, is_stopping=lambda: True) as display:
            display.begin(1000, 0)
            display.numbers(500, LINE)

    bars = [
        line for line in lines_of(printed(show, terminal=True, width=width)) if line
    ]
    assert bars and all("stop" in line for line in bars)
    assert max(map(len, bars)) <= width - len("^C") - 1
    assert "stopped" in bars[-1]


def test_a_terminal_shows_what_is_being_done_and_keeps_the_bar_only():
    def show(console):
        with TrainingProgress(console) as display:
            with display.doing("reading"), display.doing("converting"):
                pass
            display.begin(10, 0)
            with display.doing("compiling"):
                pass

    lines = lines_of(printed(show, terminal=True))
    shown = [line.split()[1] for line in lines if line.strip()]
    order = ["starting", "reading", "converting", "reading", "starting"]
    order += ["compiling", "training"]
    assert [what for what, _ in itertools.groupby(shown)] == order


def test_a_log_file_names_what_takes_long(monkeypatch):
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 0.01)
    out = io.StringIO()
    display = TrainingProgress(Console(file=out, width=80))
    with display, display.doing("compiling"):
        while not out.getvalue():
            time.sleep(0.01)
    assert out.getvalue() == "compiling ...\n"


def test_a_log_file_says_nothing_of_what_is_quick():
    def show(console):
        with TrainingProgress(console) as display, display.doing("compiling"):
            pass

    assert printed(show) == ""


HOSTILE = "[/b] [bold]x :smile: \x1b]0;title\x07 \r\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_texts_of_others_are_printed_as_they_are(terminal):
    report = {"examples": {HOSTILE: 1}, "split_rule": HOSTILE, "totals": {HOSTILE: 2}}
    (site, *_) = sites_of("fp8_rowwise")
    site = dataclasses.replace(site, path=HOSTILE)
    plan = DispatchPlan(((HOSTILE, Decision(BF16, HOSTILE, runner_up=HOSTILE)),))
    line = dict.fromkeys(("auc", "logloss", "ne", "calibration")) | {"split": HOSTILE}

    def show(console):
        console.width = 500
        print_data(console, report)
        print_sites(console, (site,))
        print_plan(console, plan, (HOSTILE,))
        with TrainingProgress(console) as display:
            display.say(f"the step did not compile: {HOSTILE}")
            display.evaluation(5, line)

    text = printed(show, terminal=terminal)
    shown = r"[/b] [bold]x :smile: \x1b]0;title\x07 \r\n"
    assert text.count(shown) == 11
    assert "\x1b]0" not in text and "\x07" not in text


def test_an_evaluation_is_one_line():
    line = {
        "split": "valid",
        "auc": None,
        "logloss": 0.5,
        "ne": 0.9,
        "calibration": 1.0,
    }

    def show(console):
        TrainingProgress(console).evaluation(5, line)

    assert printed(show) == (
        "step 5  valid: AUC n/a  log loss 0.50000  NE 0.90000  calibration 1.0000\n"
    )
