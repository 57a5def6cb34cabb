import copy

import pytest

from loka_jax.report import ComparedRun, write_compare_page
from tests.support.report import (
    HOSTILE,
    Page,
    assert_escaped,
    assert_self_contained,
    hostile,
)
from tests.unit.report.comparison_test import scored
from tests.unit.report.run_page_test import RUN


def compared(
    name, *, seed=3, recipe="fp8", ne=0.85, rate=1000.0, scores=None, tasks=()
):
    """Returns `RUN` with another name and other numbers.

    Its scores are those of a single label, or of each of `tasks`.
    """
    summary, config = copy.deepcopy(RUN.summary), copy.deepcopy(RUN.config)
    summary["final_eval"]["ne"] = ne
    summary["examples_per_second"] = rate
    config |= {"seed": seed, "recipe": recipe}
    evals = [line | {"ne": line["ne"] + ne - 0.85} for line in RUN.evals]
    files = RUN._replace(summary=summary, config=config, evals=evals)
    by_label = dict.fromkeys(tasks or ("",), scores) if scores is not None else {}
    return ComparedRun(name, files, by_label)


RUNS = [
    compared("base", recipe="bf16", scores=scored(1)),
    compared("other", ne=0.86, rate=1250.0, scores=scored(2)),
    compared("base-4", recipe="bf16", seed=4),
    compared("other-4", seed=4, ne=0.865),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("compare") / "compare.html"
    return Page(write_compare_page(path, RUNS, "python experiments/compare.py a b"))


def test_the_page_tells_metrics_and_speed_of_each_run(page):
    rows = page.rows("Final metrics and speed")
    numbers = ["test", "0.75123", "0.45000", "0.86000", "1.0100", "1,250", "20"]
    assert rows[2][:8] == ["other", *numbers] and len(rows) == 5
    assert page.tiles["Lowest NE, test"] == ("0.85000", "base")
    assert page.tiles["Most examples/s"] == ("1,250", "other")


def test_the_page_tells_paired_differences(page):
    rows = page.rows("Paired differences")
    by_example = rows[1:4]
    assert by_example[0][0] == "other" and "±" in by_example[0][1]
    assert by_example[0][-2:] == ["3,000", "1.250"]
    missing = "not the same examples, or no scores were kept"
    assert by_example[1] == ["base-4", missing, "1.000"]
    by_step = ["other", "+0.00000 ± 0.00000", "+0.01000 ± 0.00000"]
    assert rows[5][:3] == by_step and rows[5][-1] == "2"
    assert rows[-1][2] == "+0.01250 ± 0.03177"  # 12.7062 * 0.0025, seeds 3 and 4
    assert "other, other-4; seeds 3, 4" in page.text


def test_runs_with_several_labels_are_paired_by_each(tmp_path):
    tasks = ("click", "buy")
    runs = [compared(f"{i}", scores=scored(i), tasks=tasks) for i in (1, 2)]
    page = Page(write_compare_page(tmp_path / "x.html", runs, ""))
    names = [row[0] for row in page.rows("Paired differences")]
    assert names[1:3] == ["2, click", "2, buy"]


def test_the_page_tells_what_differs_and_draws_every_run(page):
    assert page.rows("What differs in the configurations") == [
        ["setting", "base", "other", "base-4", "other-4"],
        ["seed", "3", "3", "4", "4"],
        ["recipe", "bf16", "fp8", "bf16", "fp8"],
    ]
    legends = [" ".join(x.itertext()).split() for x in page.root.iter("figcaption")]
    assert ["NE,", "valid", "base", "other", "base-4", "other-4"] in legends
    assert {f"var(--run{i})" in page.html for i in range(4)} == {True}
    assert "python experiments/compare.py a b" in page.text
    assert_self_contained(page)


def test_names_of_runs_are_no_html(tmp_path):
    files = [run.files for run in RUNS[:2]]
    runs = [
        ComparedRun(f"{HOSTILE}{i}", each._replace(config=hostile(each.config)), {})
        for i, each in enumerate(files)
    ]
    runs[0].files.config["x"] = HOSTILE
    assert_escaped(Page(write_compare_page(tmp_path / "x.html", runs, HOSTILE)))


def test_a_run_on_other_data_is_named_and_not_paired(tmp_path):
    other = compared("x")
    other.files.config["data"] = {"label": "buy"}
    page = Page(write_compare_page(tmp_path / "x.html", [*RUNS[:2], other], ""))
    assert "x is not compared with base: data.label is None and buy." in page.text
    assert [row[0] for row in page.rows("Paired differences")[1:2]] == ["other"]
    with pytest.raises(ValueError, match="x has nothing in common with base"):
        write_compare_page(tmp_path / "x.html", [RUNS[0], other], "")


def test_empty_runs_have_a_page(tmp_path):
    empty = [
        ComparedRun(name, RUN._replace(summary={}, train=[], evals=[]), {})
        for name in "ab"
    ]
    page = Page(write_compare_page(tmp_path / "x.html", empty, ""))
    assert "configurations and versions are the same" in page.text


def test_a_seventeenth_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="number of runs is 17: name 2 to 16"):
        write_compare_page(tmp_path / "x.html", [compared("x")] * 17, "")
