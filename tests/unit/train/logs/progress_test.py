"""What a person sees in a log file, and that no text of others is markup."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from experiments.configs import get_config
from loka_jax import nn
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.dispatch.printing import print_plan, print_sites
from loka_jax.site import BF16
from loka_jax.train.logs import printing, progress

LINE = {"loss": 0.5, "ne": None, "examples_per_second": 12345.6, "skipped_steps": 2}
HOSTILE = "[/b] [bold]x :smile: \x1b]0;title\x07 \r\n"


def printed(show, *, terminal=False) -> str:
    out = io.StringIO()
    how = dict(soft_wrap=True, force_terminal=terminal, highlight=False)
    show(Console(file=out, width=500, **how))
    return out.getvalue()


def test_a_log_file_gets_a_line_every_ten_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def show(console):
        with progress.TrainingProgress(console) as display:
            display.begin(1000, 0)
            for step in range(1, 8):
                now[0] += 4.0
                display.step(step)
                display.numbers(step, LINE)

    assert printed(show).splitlines() == [
        f"step {step} of 1,000  loss 0.5000  NE n/a  12,346 examples/s  skipped 2"
        for step in (3, 6)
    ]


def test_irregular_values_are_told_by_column():
    columns = {f"c{i}": {"oov": i + 1, "nan": i == 3} for i in range(7)}
    report = {"examples": {"train": 9}, "split_rule": "none"}
    report |= {"totals": {"oov": 29, "nan": 1, "inf": 0}, "bad_rows": {"count": 2}}
    report["splits"] = {"train": {"columns": columns}}
    report["splits"]["valid"] = {"columns": {"c0": {"oov": 1}}}
    text = printed(lambda console: printing.print_data(console, report))
    assert text.splitlines()[1] == (
        "Irregular values, handled as configured: 29 not in the vocabulary (c6 7, "
        "c5 6, c4 5, c3 4, c2 3 and 2 more); 1 nan (c3 1); 2 bad rows."
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_texts_of_others_are_printed_as_they_are(terminal):
    column = dict(rows=4, values=None, most_frequent=[[HOSTILE, 3]], warning=HOSTILE)
    report = {"examples": {HOSTILE: 1}, "split_rule": HOSTILE, "totals": {HOSTILE: 2}}
    report["categorical"] = {HOSTILE: column}
    model = get_config("fp8_dlrm").model.clone(recipe="fp8_rowwise")
    shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 13), (64, 26, 16)))
    site = dataclasses.replace(nn.list_sites(model, *shapes)[0], path=HOSTILE)
    plan = DispatchPlan(((HOSTILE, Decision(BF16, HOSTILE, runner_up=HOSTILE)),))
    line = dict.fromkeys(("auc", "logloss", "ne", "calibration")) | {"split": HOSTILE}

    def show(console):
        printing.print_data(console, report)
        printing.print_columns(console, report, {HOSTILE: 4})
        print_sites(console, (site,))
        print_plan(console, plan, (HOSTILE,), (site,))
        with progress.TrainingProgress(console) as display:
            display.say(f"the step did not compile: {HOSTILE}")
            display.evaluation(5, line)

    text = printed(show, terminal=terminal)
    shown = r"[/b] [bold]x :smile: \x1b]0;title\x07 \r\n"
    assert text.count(shown) >= 9  # of cells some are wrapped
    assert "\x1b]0" not in text and "\x07" not in text
