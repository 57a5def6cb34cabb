"""Tables of sites and plans fold identical layers, and have 100 columns at most."""

import dataclasses
import io

import pytest
from rich.console import Console

from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.dispatch.printing import folded, print_plan, print_sites
from loka_jax.site import BF16, Choice
from tests.support.dispatch import ROW, site


@pytest.mark.parametrize(
    "paths, name",
    [
        (["head"], "head"),
        ([f"layer_{i}/up" for i in range(3)], "layer_{0..2}/up (3)"),
        ([f"l_{i}/up_{j}" for i in (0, 1) for j in (3, 5)], "l_{0..1}/up_{3,5} (4)"),
        (["a_1/up_7", "a_2/up_7"], "a_{1..2}/up_7 (2)"),
        ([f"a_{i}" for i in (1, 3, 5, 7, 9)], "a_{1..9} (5)"),
    ],
)
def test_a_row_names_all_of_its_layers(paths, name):
    ((found, key, values),) = folded((path, "key", i) for i, path in enumerate(paths))
    assert (found, key, values) == (name, "key", list(range(len(paths))))


def test_layers_of_which_other_things_are_to_be_said_have_rows_of_their_own():
    rows = [("a_0", "x", 0), ("b_0", "x", 1), ("a_1", "y", 2), ("a_2", "x", 3)]
    assert [(name, key) for name, key, _ in folded(rows)] == [
        ("a_{0,2} (2)", "x"),
        ("b_0", "x"),
        ("a_1", "y"),
    ]


def printed(show):
    out = io.StringIO()
    show(Console(file=out, width=300, soft_wrap=True))
    return out.getvalue().splitlines()


def test_forty_layers_are_a_few_lines_of_a_hundred_columns():
    sites = [site(f"layer_{i}/dense_{j}", k=64 * j) for i in range(20) for j in (1, 2)]
    first = Choice.parse(ROW)
    decisions = [
        Decision(BF16, "no FP8 is fast and accurate enough " * 3, 1.0, None, "x " * 40)
        if "dense_1" in each.path
        else Decision(first, "the fastest", 1.5, 0.03 + 0.0001 * i, None, 0.1)
        for i, each in enumerate(sites)
    ]
    paths = [each.path for each in sites]
    plan = DispatchPlan(tuple(zip(paths, decisions, strict=True)))
    lines = printed(lambda console: print_plan(console, plan, ("a note",), sites))
    text = "\n".join(lines[:-1])
    assert lines[0] == "a note" and max(map(len, lines[:-1])) <= 100
    assert len(lines) < 30
    assert "layer_{0..19}/dense_2 (20)" in text
    assert "1.50x +-10%" in text and "0.030-0.034" in text
    lines = printed(lambda console: print_sites(console, tuple(sites)))
    assert lines[-1] == "40 of 40 sites in FP8."
    assert len([line for line in lines if "128 x " in line]) == 2


def test_a_reason_against_one_kernel_names_alike_sites_together():
    apart = [
        dataclasses.replace(site(f"a_{i}"), apart="something else reads it")
        for i in range(3)
    ]
    lines = printed(lambda console: print_sites(console, tuple(apart)))
    assert "No fused kernel at a_{0..2} (3): something else reads it." in lines


def test_long_paths_leave_room_for_the_rest():
    paths = [f"wukong_layer_{i}/mlp_of_experts/dense_{i}/projection" for i in range(3)]
    name = "xla fp8_tensorwise_delayed/bf16/fp8_tensorwise_delayed"
    decision = Decision(Choice.parse(name), "x " * 20, 1.0, 0.03, "y " * 60, 0.12)
    plan = DispatchPlan(tuple((path, decision) for path in paths))
    lines = printed(lambda console: print_plan(console, plan, (), []))
    assert max(map(len, lines[:-1])) <= 100
    assert any(line.strip().startswith("wukong_layer_{0..2}/") for line in lines)
    assert any("1.00x +-12%" in line and "0.030" in line for line in lines)
