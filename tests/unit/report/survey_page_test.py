import pytest

from loka_jax.report import charts
from loka_jax.report.survey_page import write_survey_page
from tests.support.report import Page, with_leaves

# Of each measure and draw another multiple, so that no column can stand for another.
NAMES = {"relative_l2": 1, "mere": 20, "worst_row": 4}
DRAWS = {"learned": 1.0, "normal": 1.1, "real": 1.3}


def candidate(error, us=None, **verdict):
    """Returns a candidate's record; without a verdict that of bfloat16."""
    means = {
        draw: {name: error * off * part for name, part in NAMES.items()}
        for draw, off in DRAWS.items()
    }
    interval = lambda x: {"mean": x, "low": x - 0.001, "high": x + 0.003}  # noqa: E731
    record = {"errors": with_leaves(means, interval), "us": us, "speedup": None}
    return record | verdict | ({"reason": f"relative L2 {error}"} if verdict else {})


def judged(error, us, is_safe, is_fast, speedup):
    return candidate(error, us, is_safe=is_safe, is_fast=is_fast, speedup=speedup)


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
    "survey": {"pairs": 6, "rows": 32, "captured_batches": 2},
    "loss_recipe": "fp8_tensorwise",
    "versions": {"device_kind": "NVIDIA H200"},
    "steps": 1536,
    "warnings": ["a: 3 rows are too few"],
    "sites": [
        site(
            "a",
            fwd={
                "xla fp8": judged(0.03, 8.0, True, True, 1.25),
                "pallas fp8": judged(0.04, 5.0, True, True, 2.0),
                "triton fp8": judged(0.5, 1.0, False, True, 10.0),
            },
            dlhs={
                "xla fp8": judged(0.3, 4.0, False, False, 0.9),
                "pallas fp8": judged(0.2, 4.5, False, False, 0.8),
            },
            drhs={"xla fp8": judged(0.03, 11.0, True, False, 0.9)},
        )
    ],
    "not_surveyed": [{"path": "head", "m": 4096, "k": 64, "n": 1, "why": "recipe f32"}],
    "sensitivity": {"a": EFFECT, "all sites": EFFECT | {"moved": 0.02}},
    "prediction": {
        source: {"rank_correlation": rank, "mean_deviation": 0.033, "count": 6}
        | {"wrong_verdicts": ["a fwd xla fp8"]}
        for source, rank in (("learned", 0.97296), ("normal", 0.5))
    },
    "command": "python experiments/probe.py --config fp8_dlrm",
}
AMAXES = [{"step": 1, "a/lhs": 1.0}, {"step": 2, "a/lhs": 2.0}]


@pytest.fixture
def page_of(tmp_path, monkeypatch):
    """Returns a function from a survey to its page, without drawings."""
    monkeypatch.setattr(charts, "_draw", lambda *_, **__: "")
    path = tmp_path / "probe.html"
    return lambda survey, amaxes=AMAXES: Page(write_survey_page(path, survey, amaxes))


def test_the_page_tells_the_headline_numbers(page_of):
    page = page_of(SURVEY)
    tiles = {"Sites": "1", "Roles safe in FP8": "2 of 3", "Safe and fast": "1 of 3"}
    tiles |= {"Learned draws": "0.973", "N(0, 1) draws": "0.500"}
    tiles |= {"Most moved by": "2.00 %"}
    assert {name: page.tiles[name][0] for name in tiles} == tiles
    for said in (
        "off by 3.3 % on average; the verdict would have been wrong at 1 of 6 ",
        "a: 3 rows are too few",
        SURVEY["command"],
    ):
        assert said in page.text


def test_the_fastest_safe_candidate_is_the_best(page_of):
    rows = page_of(SURVEY).rows("Where FP8 is safe and fast")[1:]
    assert rows == [
        ["a", "4,096 × 64 × 32", "safe fast pallas fp8 relative L2 0.04"]
        + ["unsafe slow pallas fp8 relative L2 0.2"]
        + ["safe slow xla fp8 relative L2 0.03", "2.00 %"],
        ["head", "4,096 × 64 × 1", "recipe f32"],
    ]


def test_without_times_the_safe_candidate_of_least_error_is_the_best(page_of):
    fwd = {k: judged(x, None, True, None, None) for k, x in (("a", 0.04), ("b", 0.03))}
    one = site("a", bf16_us=None, fwd=fwd)
    for name, real in (("a", 0.01), ("b", 0.02)):  # the learned draws decide
        fwd[name]["errors"]["normal"]["relative_l2"]["mean"] = real
    page = page_of(SURVEY | {"sites": [one]})
    assert page.tiles["Safe and fast"] == ("n/a", "nothing was timed")
    _, row, _ = page.rows("Where FP8 is safe and fast")
    assert row[2:4] == ["safe b relative L2 0.03", "–"]


def test_every_candidate_effect_and_distribution_is_shown(page_of):
    page = page_of(SURVEY)
    rows = page.rows("Every candidate")
    errors = ["0.0300 ± 0.0020", "0.0330", "0.0390", "0.60", "0.120"]
    assert rows[2][:3] == ["fwd", "xla fp8", "safe fast relative L2 0.03"]
    assert rows[2][3:] == [*errors, "8.0", "1.25"]
    assert rows[-2:] == [["xla bf16", "40.0", "1.00"], ["xla fp8", "50.0", "0.80"]]
    interval = "-0.6000 … +0.2000 %"
    assert page.bars() == ["50.0%", "100.0%"]
    assert page.rows("Effect on the loss")[1:] == [
        ["a", "2.000 %", "", "-0.2000 %", interval],
        ["all sites", "4.000 %", "", "-0.2000 %", interval],
    ]
    numbers = ["0.5", "1.25", "3.0", "4", "0.50", "1.50 %", "0.00 %", "n/a"]
    lhs, rhs, _ = page.rows("Distributions")[1:]
    assert lhs[:10] == ["a", "lhs", *numbers] and rhs[:2] == ["", "rhs"]
    assert lhs[11] == "amax of a/lhs" and rhs[11] == "no value"
