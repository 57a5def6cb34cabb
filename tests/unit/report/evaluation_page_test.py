"""The page of `loka evaluate`."""

from loka_jax.report.evaluation_page import write_evaluation_page
from tests.support.report import HOSTILE, Page

NUMBERS = {"rows": 1200, "clicks": 300, "auc": 0.75123, "auc_half": 0.01}
NUMBERS |= {"logloss": 0.45, "logloss_half": 0.02, "ne": 0.85, "ne_half": 0.03}
NUMBERS |= {"calibration": 1.01, "calibration_half": 0.04}
NONE = {"rows": 3, "clicks": 0} | dict.fromkeys(("auc", "logloss", "ne", "calibration"))


def page_of(tmp_path, numbers, by=()):
    view = {"title": "run", "command": "loka evaluate", "step": 1234, "by": by}
    return Page(write_evaluation_page(tmp_path / "page.html", numbers, **view))


def test_a_page_shows_all_rows_groups_and_importance(tmp_path):
    ranked = {"gauc": 0.7, "ndcg": 0.6, "k": 5}
    numbers = {
        "overall": {"click": NUMBERS | ranked},
        "groups": {HOSTILE: {"click": NONE | ranked}},
        "importance": [{"column": "user", "ne": 0.05, "half": 0.001}],
    }
    page = page_of(tmp_path, numbers, by=("country",))
    assert "1,200 rows" in page.text and "weights of step 1,234" in page.text
    for shown in ("0.75123", "± 0.01000", "1.0100", "NDCG@5", "0.60000"):
        assert shown in page.text
    (row,) = page.rows("By country")[1:]
    assert row[:4] == [HOSTILE, "3", "0", "n/a"] and row[-2] == "0.70000"
    assert page.rows("Importance of columns")[1] == ["user", "+0.05000 ± 0.00100"]


def test_labels_are_named_if_there_are_several_and_nothing_else_is_shown(tmp_path):
    page = page_of(tmp_path, {"overall": {"click": NUMBERS, "buy": NONE}, "groups": {}})
    assert "AUC of click" in page.text and "AUC of buy" in page.text
    assert "By " not in page.text and "Importance" not in page.text
