import html.parser
import json
import re
import subprocess
import sys

import pytest

from loka_jax.train import report_html, report_plots, report_tables
from loka_jax.train.report import write_report

HOSTILE = "<script>alert('&\"')</script>"


class Outline(html.parser.HTMLParser):
    """Reads a page and insists that its tags are balanced."""

    VOID = {"meta", "br", "wbr"}

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.ids, self.text = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def words(self):
        """Returns the page's text as one line."""
        return " ".join(" ".join(self.text).split())


def train_line(step, **more):
    return {
        "step": step,
        "epoch": 0,
        "kind": "train",
        "examples": step * 100,
        "seconds": step / 10,
        "loss": 0.5 + 1 / step,
        "ne": 0.8 + 1 / step,
        "examples_per_second": 1000.0,
        "lr": 1e-3,
        "skipped_steps": int(step >= 7),
    } | more


def eval_line(step, **more):
    return {
        "step": step,
        "epoch": 0,
        "kind": "eval",
        "split": "valid",
        "examples": step * 100,
        "seconds": step / 10,
        "auc": 0.75,
        "logloss": 0.45,
        "ne": 0.85,
        "calibration": 1.01,
    } | more


SITES = [
    {"path": "bottom_mlp/dense_0", "m": 64, "k": 13, "n": 32, "recipe": "fp8_rowwise"}
    | dict.fromkeys(("fwd", "dlhs", "drhs"), "bf16 (xla)")
    | {"why_not": "k = 13 is no multiple of 16"},
    {"path": "top_mlp/dense_0", "m": 64, "k": 32, "n": 32, "recipe": "fp8_rowwise"}
    | {"fwd": "e4m3 x e4m3 (xla)", "dlhs": "e5m2 x e4m3 (xla)", "drhs": "bf16 (xla)"}
    | {"why_not": None},
]

SUMMARY = {
    "config": {"name": "fp8_dlrm", "model": {"hidden": [32, 32]}},
    "seed": 3,
    "recipe": "fp8_rowwise",
    "versions": {"jax": "0.11.2", "device_kind": "cpu"},
    "steps": 20,
    "examples": 2000,
    "seconds": 125.0,
    "examples_per_second": 12_345_678.9,
    "skipped_steps": 1,
    "final_eval": {"auc": 0.75123, "logloss": 0.45, "ne": 0.85, "calibration": 1.01},
    "best_possible_ne": 0.8,
    "sites": {"total": 2, "fp8": 1},
    "command": "uv run python experiments/train.py --config fp8_dlrm --seed 3",
    "data": {
        "split_rule": "by hash",
        "examples": {"train": 2000},
        "splits": {"train": {"columns": {"I1": {"missing": 7}, "C1": {"oov": 4321}}}},
        "bad_rows": {
            "count": 1,
            "samples": [{"file": "a.tsv", "row": 9, "reason": "short"}],
        },
    },
}


def make_run(workdir, *, leave_out=(), summary=SUMMARY, sites=SITES, extra=()):
    """Writes the files of a run, but for those in `leave_out`."""
    metrics = [train_line(step) for step in range(1, 21)]
    metrics += [eval_line(10), eval_line(20), *extra]
    scales = [{"step": s, "top_mlp/dense_0/lhs": 2.0 ** (s - 9)} for s in range(1, 9)]
    files = {
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in metrics),
        "scales.jsonl": "".join(json.dumps(line) + "\n" for line in scales),
        "sites.json": json.dumps(sites),
        "summary.json": json.dumps(summary),
        "config.json": json.dumps({"name": "fp8_dlrm", "seed": 3}),
    }
    for name, text in files.items():
        if name not in leave_out:
            (workdir / name).write_text(text)
    return workdir


def read(workdir):
    """Returns the report's HTML and its outline."""
    page = write_report(workdir).read_text()
    return page, Outline(page)


def test_the_page_tells_the_headline_numbers(tmp_path):
    _, outline = read(make_run(tmp_path))
    text = outline.words()
    assert "AUC 0.75123" in text
    assert "NE 0.85000 normalized entropy; best possible 0.80000" in text
    assert "NE gap closed 75.0 %" in text  # (1 - 0.85) / (1 - 0.8)
    assert "Examples/s 12.3 M" in text
    assert "FP8 sites 1 of 2" in text
    assert "2 min 05 s" in text
    assert "1 step was skipped" in text


def test_the_page_tells_sites_data_and_command(tmp_path):
    _, outline = read(make_run(tmp_path))
    text = outline.words()
    assert "k = 13 is no multiple of 16" in text
    assert "e5m2 x e4m3 (xla)" in text
    assert "7 missing, 4,321 oov" in text
    assert "1 bad row was left out" in text and "a.tsv 9 short" in text
    assert SUMMARY["command"] in text
    assert "model.hidden 32 32" in text
    assert "2 −8 → 2 −1" in text


def test_the_page_asks_nothing_from_anywhere(tmp_path):
    page, outline = read(make_run(tmp_path))
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link|<img|src=", page)
    assert not re.search(r"url\((?!#)", page)
    assert {"script", "link", "img", "iframe"}.isdisjoint(outline.tags)


def test_ids_are_unique_over_all_drawings(tmp_path):
    page, outline = read(make_run(tmp_path))
    assert outline.tags.count("figure") == 4
    assert len(set(outline.ids)) == len(outline.ids)
    for name in re.findall(r'(?:url\(#|href="#)([^)"]+)', page):
        assert name in outline.ids


def test_drawings_take_their_colors_and_fonts_from_the_page(tmp_path):
    page, _ = read(make_run(tmp_path))
    (body,) = re.findall(r"<body>.*</body>", page, flags=re.DOTALL)
    assert "var(--accent)" in body and "var(--good)" in body
    assert "#0102" not in body and "font-family" not in body


@pytest.mark.parametrize("place", ["config", "site", "data", "scale", "split"])
def test_names_of_a_run_are_no_html(place, tmp_path):
    summary = json.loads(json.dumps(SUMMARY))
    sites = json.loads(json.dumps(SITES))
    extra = []
    if place == "config":
        summary["config"]["name"] = summary["config"][HOSTILE] = HOSTILE
        summary["versions"]["device_kind"] = summary["recipe"] = HOSTILE
        summary["command"] = HOSTILE
    if place == "site":
        sites[0] |= dict.fromkeys(("path", "recipe", "fwd", "why_not", "m"), HOSTILE)
    if place == "data":
        summary["data"] = {
            "split_rule": HOSTILE,
            HOSTILE: HOSTILE,
            "columns": {HOSTILE: {"missing": 1}},
            "bad_rows": {"count": 1, "samples": [{HOSTILE: HOSTILE}]},
        }
    if place == "split":
        extra = [eval_line(20, split=HOSTILE)] * 3
    make_run(tmp_path, summary=summary, sites=sites, extra=extra)
    if place == "scale":
        line = json.dumps({"step": 1, f"{HOSTILE}/lhs": 1.0, HOSTILE: 2.0})
        (tmp_path / "scales.jsonl").write_text(line + "\n")
    page, outline = read(tmp_path)
    assert "<script" not in page and "script" not in outline.tags
    assert "alert(" in page  # shown, as text


@pytest.mark.parametrize(
    "missing",
    [
        ("summary.json",),
        ("metrics.jsonl",),
        ("sites.json", "scales.jsonl"),
        ("summary.json", "sites.json", "scales.jsonl", "config.json"),
        ("summary.json", "sites.json", "scales.jsonl", "metrics.jsonl"),
    ],
)
def test_any_file_may_be_missing(missing, tmp_path):
    _, outline = read(make_run(tmp_path, leave_out=missing))
    assert outline.tags.count("h1") == 1


def test_an_interrupted_run_says_so_and_shows_its_last_evaluation(tmp_path):
    _, outline = read(make_run(tmp_path, leave_out=("summary.json",)))
    text = outline.words()
    assert "not finished" in text and "The run has not ended" in text
    assert "AUC 0.75000 valid, step 20" in text
    assert "FP8 sites 1 of 2" in text
    assert "--config fp8_dlrm" in text


def test_a_broken_file_is_named_and_left_out(tmp_path):
    make_run(tmp_path)
    (tmp_path / "sites.json").write_text('[{"path"')
    (tmp_path / "summary.json").write_text("[]")
    text = read(tmp_path)[1].words()
    assert "sites.json is broken" in text and "summary.json is broken" in text


def test_values_that_do_not_exist_read_na(tmp_path):
    final = {"auc": None, "ne": None, "logloss": 0.4, "calibration": float("nan")}
    make_run(tmp_path, summary=SUMMARY | {"final_eval": final})
    text = read(tmp_path)[1].words()
    assert "AUC n/a" in text and "NE n/a" in text and "NE gap closed n/a" in text
    assert "Calibration n/a" in text


def test_values_of_a_wrong_kind_do_no_harm(tmp_path):
    summary = dict.fromkeys(SUMMARY, "text") | {"sites": 3, "data": {"splits": [1]}}
    make_run(tmp_path, summary=summary, sites=[1, {"m": "x"}, {}])
    line = {"step": "x", "kind": "train", "loss": "y", "examples": None, "ne": True}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "scales.jsonl").write_text('{"step": 1, "a/lhs": "x", "b/g": -1}\n')
    _, outline = read(tmp_path)
    assert "What ran at each site" in outline.words()


def test_without_matplotlib_the_page_says_so_and_shows_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(report_plots, "can_draw", lambda: False)
    _, outline = read(make_run(tmp_path))
    text = outline.words()
    assert "install loka-jax[report]" in text
    assert "figure" not in outline.tags and "0.75000 0.45000 0.85000" in text


def test_a_folder_without_a_run_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="holds no run .*--workdir"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="holds no run"):
        write_report(tmp_path / "absent")
    assert list(tmp_path.iterdir()) == []


def test_the_same_run_gives_the_same_page(tmp_path):
    assert read(make_run(tmp_path))[0] == read(tmp_path)[0]


def test_importing_the_report_imports_no_matplotlib():
    code = (
        "import sys, loka_jax.train.report;"
        "print([m for m in ('matplotlib', 'orbax', 'sklearn') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == "[]", out.stderr


def test_a_scale_that_halves_falls_by_an_equal_step():
    svg = report_html.sparkline([2.0**-k for k in range(9)], title="x")
    (points,) = re.findall(r'points="([^"]+)"', svg)
    ys = [float(point.split(",")[1]) for point in points.split()]
    assert ys == pytest.approx([3 + 3 * k for k in range(9)])


def test_a_scale_without_value_leaves_a_gap():
    svg = report_html.sparkline([1.0, 2.0, None, 0.0, 4.0, 2.0], title="x")
    assert svg.count("<polyline") == 2


def test_a_chart_without_points_is_left_out():
    curve = report_plots.Curve(label="x", points=[(1.0, None)], color="accent")
    assert report_plots.chart("AUC", [curve]) == ""


def test_the_limits_leave_out_the_first_steps_of_a_run():
    ys = [10.0] * 5 + [1.0] * 95 + [0.5]
    curve = report_plots.Curve(
        label="x", points=[(float(x), y) for x, y in enumerate(ys)], color="accent"
    )
    low, high = report_plots._limits([curve], 0.4)
    assert low < 0.4 and 1.0 < high < 1.1


def test_nested_values_are_shown_by_dotted_name():
    assert report_tables.flat({"a": {"b": [1, 2], "c": {}}, "d": None}) == [
        ("a.b", "1 2"),
        ("a.c", {}),
        ("d", None),
    ]
