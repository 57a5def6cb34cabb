import pytest

from loka_jax.report import write_survey_page
from tests.support.report import (
    HOSTILE,
    Page,
    assert_cards_are_labelled,
    assert_escaped,
    assert_self_contained,
    hostile,
)

NAMES = ("relative_l2", "mere", "median", "worst_row", "underflow", "saturation")


def candidate(error, us=None, is_safe=None, is_fast=None, speedup=None):
    """Returns a candidate's record; without `is_safe` that of bfloat16."""
    interval = {"mean": error, "low": error - 0.001, "high": error + 0.001}
    errors = {s: dict.fromkeys(NAMES, interval) for s in ("learned", "normal", "real")}
    record = {"errors": errors, "us": us, "speedup": speedup}
    if is_safe is None:
        return record
    reason = f"relative L2 {error}"
    return record | {"is_safe": is_safe, "is_fast": is_fast, "reason": reason}


def site(path, bf16_us=10.0, **roles):
    base = {"xla bf16": candidate(0.002, bf16_us)}
    stats = {"mean": 0.5, "deviation": 1.25, "kurtosis": 3.0, "amax": 4.0}
    stats |= {"amax_ratio": 0.5, "underflow": 0.015, "saturation": 0.0}
    stats |= {"spectrum": [4.0, 2.0, 1.0]}
    return {
        "path": path,
        **{"m": 4096, "k": 64, "n": 32},
        "statistics": dict.fromkeys(("lhs", "rhs", "g"), stats),
        "roles": {role: base | roles.get(role, {}) for role in ("fwd", "dlhs", "drhs")},
        "training_us": {"xla fp8": 50.0, "xla bf16": 40.0},
    }


EFFECT = {"loss": 0.5, "moved": 0.01, "relative": -0.002, "low": -0.003, "high": 0.001}
SURVEY = {
    "model": "fp8_dlrm",
    "config": {"name": "fp8_dlrm"},
    "survey": {"pairs": 6, "rows": 32, "captured_batches": 2}
    | {"loss_recipe": "fp8_tensorwise"},
    "versions": {"device_kind": "NVIDIA H200"},
    "steps": 1536,
    "warnings": ["a: 3 rows are too few"],
    "sites": [
        site(
            "a",
            fwd={
                "xla fp8": candidate(0.03, 8.0, True, True, 1.25),
                "pallas fp8": candidate(0.04, 5.0, True, True, 2.0),
                "triton fp8": candidate(0.5, 1.0, False, True, 10.0),
            },
            dlhs={
                "xla fp8": candidate(0.3, 4.0, False, False, 0.9),
                "pallas fp8": candidate(0.2, 4.5, False, False, 0.8),
            },
        )
    ],
    "not_surveyed": [{"path": "head", "m": 4096, "k": 64, "n": 1, "why": "recipe f32"}],
    "sensitivity": {"a": EFFECT, "all sites": EFFECT | {"moved": 0.02}},
    "prediction": dict.fromkeys(
        ("learned", "normal"),
        {"rank_correlation": 0.97296, "mean_deviation": 0.033, "count": 5}
        | {"wrong_verdicts": ["a fwd xla fp8"]},
    ),
    "command": "python experiments/probe.py --config fp8_dlrm",
}
AMAXES = [{"step": 1, "a/lhs": 1.0}, {"step": 2, "a/lhs": 2.0}]


@pytest.fixture
def page_of(tmp_path):
    """Returns a function from a survey to its page."""
    path = tmp_path / "probe.html"
    return lambda survey, amaxes=AMAXES: Page(write_survey_page(path, survey, amaxes))


def test_the_page_tells_the_headline_numbers(page_of):
    page = page_of(SURVEY)
    assert page.tiles["Sites"] == ("1", "1 other not FP8")
    assert page.tiles["Roles safe in FP8"][0] == "1 of 3"
    assert page.tiles["Safe and fast"][0] == "1 of 3"
    assert page.tiles["Learned draws"][0] == "0.973"
    assert page.tiles["Most moved by"] == ("2.00 %", "of an example's loss, by a")
    assert "Too few statistics to trust at 1 place " in page.text
    assert "a: 3 rows are too few" in page.text
    assert SURVEY["command"] in page.text


def test_the_fastest_safe_candidate_is_the_best(page_of):
    rows = page_of(SURVEY).rows("Where FP8 is safe and fast")[1:]
    assert rows == [
        ["a", "4,096 × 64 × 32", "safe fast pallas fp8 relative L2 0.04"]
        + ["unsafe slow pallas fp8 relative L2 0.2", "–", "2.00 %"],
        ["head", "4,096 × 64 × 1", "recipe f32"],
    ]


def test_without_times_the_safe_candidate_of_least_error_is_the_best(page_of):
    fwd = {"a": candidate(0.04, is_safe=True), "b": candidate(0.03, is_safe=True)}
    page = page_of(SURVEY | {"sites": [site("a", bf16_us=None, fwd=fwd)]})
    assert page.tiles["Safe and fast"] == ("n/a", "no GPU to time them on")
    _, row, _ = page.rows("Where FP8 is safe and fast")
    assert row[2] == "safe b relative L2 0.03"


def test_every_candidate_effect_and_distribution_is_shown(page_of):
    page = page_of(SURVEY)
    rows = page.rows("Every candidate")
    errors = ["0.0300 ± 0.0010", "0.0300", "0.0300", "0.03", "0.0300", "0.030"]
    times = ["3.00 %", "3.00 %", "8.0", "1.25"]
    assert rows[2][:3] == ["fwd", "xla fp8", "safe fast relative L2 0.03"]
    assert rows[2][3:] == errors + times
    assert rows[-2:] == [["xla bf16", "40.0", "1.00"], ["xla fp8", "50.0", "0.80"]]
    interval = "-0.6000 … +0.2000 %"
    assert page.rows("Effect on the loss")[1:] == [
        ["a", "2.000 %", "", "-0.2000 %", interval],
        ["all sites", "4.000 %", "", "-0.2000 %", interval],
    ]
    numbers = ["0.5", "1.25", "3.0", "4", "0.50", "1.50 %", "0.00 %", "n/a"]
    lhs, rhs, _ = page.rows("Distributions")[1:]
    assert lhs[:10] == ["a", "lhs", *numbers] and rhs[:2] == ["", "rhs"]
    assert lhs[11] == "amax of a/lhs" and rhs[11] == "no value"


def test_a_narrow_page_labels_cells_like_their_columns(page_of):
    assert_cards_are_labelled(page_of(SURVEY))


def test_the_page_asks_nothing_from_anywhere(page_of):
    assert_self_contained(page_of(SURVEY))


def test_names_of_a_survey_are_no_html(page_of):
    survey = hostile(SURVEY)
    survey["config"][HOSTILE] = "x"
    survey["sensitivity"] = {HOSTILE: EFFECT, f"{HOSTILE} too": EFFECT}
    for one in survey["sites"]:
        for candidates in one["roles"].values():
            candidates[HOSTILE] = candidate(0.03, 2.0, True, True, 2.0)
        one["training_us"][HOSTILE] = 1.0
    assert_escaped(page_of(survey))


def test_amaxes_of_a_wrong_kind_are_gaps(page_of):
    values = [1.0, None, "x", True, [], {}, float("inf"), 10**400, -1, 2.0]
    lines = [{"step": i, "a/lhs": value} for i, value in enumerate(values)]
    lhs, _, _ = page_of(SURVEY, [*lines, {}]).rows("Distributions")[1:]
    assert lhs[11] == "amax of a/lhs"


def test_fp8_that_moves_no_loss_has_a_page(page_of):
    still = EFFECT | {"moved": 0.0}
    page = page_of(SURVEY | {"sensitivity": {"a": still, "all sites": still}})
    assert page.tiles["Most moved by"][0] == "0.00 %"


def test_a_survey_that_measured_nothing_has_a_page(page_of):
    empty = {"sites": [], "sensitivity": {}, "prediction": {}, "warnings": []}
    text = page_of(SURVEY | empty).text
    assert "No site can be in FP8." in text
    assert "No real operands were captured." in text
    assert "Too few statistics" not in text
