import copy

import pytest

from loka_jax.report.compare_page import write_compare_page
from loka_jax.report.comparison import ComparedRun, by_examples
from tests.support.report import RUN, Page, assert_self_contained, record_charts, scored


def compared(name, *, seed=3, recipe="fp8", ne=0.85, rate=1000.0, scores=()):
    """Returns `RUN` with another name and other numbers, each off by its own."""
    off = ne - 0.85
    other = {"ne": off, "logloss": 2 * off, "auc": -3 * off, "calibration": 4 * off}
    final = RUN.summary["final_eval"]
    summary = copy.deepcopy(RUN.summary) | {
        "final_eval": {k: final[k] + x for k, x in other.items()},
        "examples_per_second": rate,
        "device": f"gpu of {name}",
    }
    evals = [
        line | {k: line[k] + step * x for k, x in other.items()}
        for step, line in enumerate(RUN.evals, 1)
    ]
    config = copy.deepcopy(RUN.config) | {"seed": seed, "recipe": recipe}
    files = RUN._replace(summary=summary, config=config, evals=evals)
    return ComparedRun(name, files, dict(scores))


RUNS = [
    compared("base", recipe="bf16", scores={"": scored(1)}),
    compared("other", ne=0.86, rate=1250.0, scores={"": scored(2)}),
    compared("base-4", recipe="bf16", seed=4, rate=800.0),
    compared("other-4", seed=4, ne=0.865),
]


@pytest.fixture
def page_of(tmp_path, monkeypatch):
    """Returns a function from runs to their page, without drawings."""
    record_charts(monkeypatch)
    return lambda runs: Page(write_compare_page(tmp_path / "x.html", runs, ""))


def test_the_page_tells_metrics_speed_settings_and_draws_every_run(tmp_path):
    command = "python experiments/compare.py a b"
    page = Page(write_compare_page(tmp_path / "compare.html", RUNS, command))
    rows = page.rows("Final metrics and speed")
    numbers = ["test", "0.72123", "0.47000", "0.86000", "1.0500", "1,250", "20"]
    about = ["125.0", "gpu of other", "step 10, the best by NE"]
    assert rows[2] == ["other", *numbers, *about] and len(rows) == 5
    assert page.tiles == {
        "Lowest NE, test": ("0.85000", "base"),
        "Highest AUC, test": ("0.75123", "base"),
        "Most examples/s": ("1,250", "other"),
    }
    assert page.rows("What differs in the configurations") == [
        ["setting", "base", "other", "base-4", "other-4"],
        ["seed", "3", "3", "4", "4"],
        ["recipe", "bf16", "fp8", "bf16", "fp8"],
    ]
    assert all(f"var(--run{i})" in page.html for i in range(4))
    assert command in page.text
    assert_self_contained(page)


def test_the_page_tells_paired_differences(page_of):
    page = page_of(RUNS)
    rows = page.rows("Paired differences")
    found = by_examples(scored(1), scored(2))
    digits = {"logloss": 5, "ne_delta_pct": 3, "auc": 5}
    shown = [f"{found[k][0]:+.{n}f} ± {found[k][1]:.{n}f}" for k, n in digits.items()]
    assert rows[1] == ["other", *shown, "3,000", "1.250"]
    missing = "not the same examples, or no scores were kept"
    assert rows[2] == ["base-4", missing, "0.800"]
    # 12.7062 * 0.0025, seeds 3 and 4
    other = "+0.02500 ± 0.06353", "+0.01250 ± 0.03177", "-0.03750 ± 0.09530"
    assert rows[-1] == ["other, other-4", *other, "+0.05000 ± 0.12706", "3, 4"]
    assert "paired with those of base, base-4" in page.text


def test_clear_differences_are_colored_by_what_is_better(page_of):
    runs = [compared("a", recipe="bf16", seed=i) for i in (3, 4)]
    runs += [compared("b", ne=x, seed=i) for i, x in ((3, 0.86), (4, 0.8601))]
    for ordered, name in ((runs, "is-bad"), ([*runs[2:], *runs[:2]], "is-good")):
        found = page_of(ordered).classes("Paired differences")[-1][1:]
        assert found == [f"num {name}"] * 3 + ["num", ""]


def test_each_curve_has_its_own_values(page_of, monkeypatch):
    drawn, _ = record_charts(monkeypatch)
    page_of(RUNS[:2])
    minus = zip((1000, 1500, 2000), (0.01, 0.02, 0.03), strict=True)
    expected = {"other": [(x, pytest.approx(y)) for x, y in minus]}
    assert drawn["NE minus the first run's, valid"] == expected
    valid = [RUNS[1].files.evals[i] for i in (0, 2)]
    for title, name, lines in (
        ("NE, valid", "ne", valid),
        ("AUC, valid", "auc", valid),
        ("Log loss, valid", "logloss", valid),
        ("Log loss, train", "loss", RUN.train),
        ("Learning rate", "lr", RUN.train),
    ):
        expected = [(line["examples"], line[name]) for line in lines]
        assert drawn[title]["other"] == expected


def test_a_run_on_other_data_is_named_and_not_paired(page_of):
    other = compared("x", ne=0.1)
    other.files.config["data"] = {"label": "buy"}
    page = page_of([*RUNS[:2], other])
    assert "x is not compared with base: data.label is None and buy." in page.text
    assert [row[0] for row in page.rows("Paired differences")[1:3]] == ["other", "runs"]
    assert page.tiles["Lowest NE, test"] == ("0.85000", "base")
    with pytest.raises(ValueError, match="x has nothing in common with base"):
        page_of([RUNS[0], other])
