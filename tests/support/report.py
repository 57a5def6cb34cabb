"""Files of a run by hand, and pages read back: well-formed XML below the first line."""

from xml.etree import ElementTree

import numpy as np

from loka_jax.report import charts
from loka_jax.report.comparison import Scored
from loka_jax.report.run_files import RunFiles

HOSTILE = "<script>alert('&\"')</script>"


def train_line(step, **more):
    """Returns a line of a training log; no two of its numbers are equal."""
    return {
        "step": step,
        "kind": "train",
        "examples": step * 100,
        "seconds": step / 10,
        "loss": 0.5 + 1 / step,
        "ne": 0.8 + 1 / step,
        "examples_per_second": 1000.0 + step,
        "lr": 1e-3 * step,
        "grad_norm": 2.5 / step,
        "host_bytes": step << 27,
        "device_peak_bytes": None,
        "skipped_steps": int(step >= 7),
    } | more


def eval_line(step, **more):
    """Returns a line of an evaluation."""
    return {
        "step": step,
        "kind": "eval",
        "split": "valid",
        "examples": step * 100,
        "auc": 0.75,
        "logloss": 0.45,
        "ne": 0.85,
        "calibration": 1.01,
    } | more


SITES = [
    {"path": "bottom_mlp/dense_0", "m": 64, "k": 13, "n": 32, "recipe": "fp8_rowwise"}
    | dict.fromkeys(("fwd", "dlhs", "drhs"), "bf16 (xla)")
    | {"why_not": "k = 13 is no multiple of 16"},
    {"path": "top_mlp/dense_0", "m": 64, "k": 32, "n": 48, "recipe": "fp8_rowwise"}
    | {"fwd": "e4m3 x e4m3 (xla)", "dlhs": "e5m2 x e4m3 (xla)", "drhs": "bf16 (xla)"}
    | {"why_not": None, "why_not_fused": "no Hopper GPU"},
    {"path": "head", "m": 64, "k": 48, "n": 1, "recipe": "f32"}
    | dict.fromkeys(("fwd", "dlhs", "drhs"), "f32 (xla)")
    | {"why_not": "the recipe is f32"},
]
SUMMARY = {
    "config": {
        "name": "fp8_dlrm",
        "model": {"hidden": [32, 32]},
        "embedding": {"dim": 16, "dims": ["C1=8"]},
    },
    "seed": 3,
    "recipe": "fp8_rowwise",
    "versions": {"jax": "0.11.2", "device_kind": "cpu"},
    "mesh": "2 x 4",
    "gradients": {"wire": "bf16", "reason": "it is faster"},
    "steps": 20,
    "examples": 2000,
    "seconds": 125.0,
    "compile_seconds": 12.25,
    "examples_per_second": 12_345_678.9,
    "skipped_steps": 1,
    "final_eval": {"auc": 0.75123, "logloss": 0.45, "ne": 0.85, "calibration": 1.01},
    "final_split": "test",
    "final_state": "step 10, the best by NE",
    "baseline_ne": {"mean": 1.00012, "logistic_regression": 0.87654},
    "best_possible_ne": 0.8,
    "sites": {"total": 3, "fp8": 1},
    "plan": [
        {"path": "top_mlp/dense_0", "choice": "pallas fp8_rowwise", "speedup": 1.25}
        | {"error": 0.0371, "reason": "the fastest", "runner_up": "xla bf16"}
    ],
    "changes": ["top_mlp/dense_1 did not compile"],
    "returns": ["Went back to step 8, learning rates halved."],
    "warnings": ["step 12: top_mlp/dense_0/lhs was clipped at 1/50,000 of its amax."],
    "command": "uv run python experiments/train.py --config fp8_dlrm --seed 3",
    "data": {
        "split_rule": "by hash",
        "notes": ["Weighted by <w>."],
        "examples": {"train": 2000, "test": 300},
        "splits": {
            "train": {"columns": {"I1": {"missing": 7}, "C1": {"oov": 4321}}},
            "test": {"columns": {"I1": {"nan": 2}}},
        },
        "categorical": {
            "C1": {"values": 90, "rows": 100, "most_frequent": [["a", 30], ["b", 2]]},
            "C2": {"values": 70, "rows": 50, "warning": "C2 has few rows"},
            "C3": {"values": 11, "rows": 100, "table_of": "C1"},
        },
        "bad_rows": {
            "count": 1,
            "samples": [{"file": "a.tsv", "row": 9, "reason": "short"}],
        },
        "format": "tsv",
    },
}
RATES = {"count": 150, "mean_prediction": 0.25, "mean_label": 0.2}
RATES |= {"mean_label_low": 0.15, "mean_label_high": 0.3, "calibration": 1.25}
RATES |= {"calibration_low": 0.8, "calibration_high": 1.6}
EVALUATION = {
    "split": "test",
    "examples": 1234,
    "calibration_curve": [RATES, RATES | {"mean_prediction": 0.5}],
    "columns": [
        {"column": "C1", "num_values": 17, "auc_within": 0.7, "covered": 0.875}
        | {
            "values": [
                {"id": 0, "auc": 0.65} | RATES,
                {"id": 3, "name": "<b> & co", "auc": None} | RATES,
                {"id": 9, "auc": 0.5} | RATES,
            ]
        }
    ],
}
RUN = RunFiles(
    summary=SUMMARY,
    config=SUMMARY["config"],
    train=[train_line(step) for step in range(1, 21)],
    evals=[eval_line(10), eval_line(15, split="test", ne=0.5), eval_line(20)],
    sites=SITES,
    scales=[{"step": s, "top_mlp/dense_0/lhs": 2.0 ** (s - 9)} for s in range(1, 9)],
    evaluation=EVALUATION,
    importance=[{"column": "C1", "ne": 0.125, "half": 0.01}],
    damage=[],
    notes=[],
)


def scored(seed, num=3000, weights=None):
    """Returns scores of the same examples for every seed, with noise of the seed."""
    rng, noise = np.random.default_rng(0), np.random.default_rng(100 + seed)
    true = rng.normal(-1, 1, num)
    labels = rng.random(num) < 1 / (1 + np.exp(-true))
    logits = (true + noise.normal(0, 0.5, num)).round(1)
    weights = np.ones(num) if weights is None else weights
    return Scored(*(x.astype(np.float32) for x in (logits, labels, weights)))


class Page:
    """A page as a tree, its text as one line, and value and note of tiles by label."""

    def __init__(self, path):
        self.html = path.read_text()
        doctype, _, rest = self.html.partition("\n")
        assert doctype == "<!doctype html>"
        self.root = ElementTree.fromstring(rest)
        self.text = text(self.root.find("body"))
        assert_fits(self.root)
        tiles = [
            [text(element) for element in tile if element.get("class") != "bar"]
            for tile in self.root.findall(".//div[@class='tile']")
        ]
        self.tiles = {label: (value, note) for label, value, note in tiles}

    def tags(self):
        """Returns the names of all elements."""
        return [element.tag for element in self.root.iter()]

    def _cells(self, title, value):
        for section in self.root.iter("section"):
            if text(section.find("h2")) == title:
                return [[value(cell) for cell in row] for row in section.iter("tr")]
        raise AssertionError(f"no section {title}")

    def rows(self, title):
        """Returns the text of all cells of the tables in the section of that title."""
        return self._cells(title, text)

    def classes(self, title):
        """Returns the classes of all cells of the tables in a section."""
        return self._cells(title, lambda cell: cell.get("class", ""))

    def bars(self):
        """Returns the widths of all bars."""
        bars = self.root.findall(".//span[@class='bar']/span")
        return [bar.get("style").removeprefix("width:") for bar in bars]


def assert_fits(root):
    """Fails if a table could make a page wider than its window, or a chart is bare."""
    for parent in root.iter():
        for child in parent:
            assert child.tag != "table" or parent.get("class") == "scroll"
            assert child.tag != "figure" or child[0].tag == "figcaption"


def text(element):
    """Returns an element's text as one line."""
    return " ".join(" ".join(element.itertext()).split())


def record_charts(monkeypatch):
    """Draws nothing; returns points by title and label, and options by title."""
    drawn, options = {}, {}

    def curves(title, series, *names, **given):
        drawn[title] = {one.label: [*one.points] for one in series}
        options[title] = given
        return []

    for name in ("curves", "scatter"):
        monkeypatch.setattr(charts, name, curves)
    return drawn, options


def assert_self_contained(page):
    """Fails if a page asks anything of a server, or runs a script."""
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(page.tags())
    given = [pair for element in page.root.iter() for pair in element.items()]
    assert not [name for name, _ in given if name.startswith("on") or name == "src"]
    assert all(value.startswith("#") for name, value in given if name == "href")
    for word in ("http:", "https:", "@import", "url(//"):
        assert word not in page.html
    assert page.html.count("url(") == page.html.count("url(#")


def with_leaves(value, change):
    """Returns a value from JSON after a change of all that is no list or dict."""
    if isinstance(value, dict):
        return {key: with_leaves(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [with_leaves(item, change) for item in value]
    return change(value)


def hostile(value):
    """Returns a value from JSON in which every text is HTML."""
    return with_leaves(value, lambda x: HOSTILE if isinstance(x, str) else x)
