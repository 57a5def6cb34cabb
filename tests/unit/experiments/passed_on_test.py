"""Each option of a command reaches what it is for: none is read and then forgotten."""

import dataclasses
import json
import pathlib
import re
from types import SimpleNamespace

import pytest

import loka_jax
from experiments import configs, evaluate, export, options, predict, probe, train
from loka_jax import export as exports
from loka_jax import jsonfile
from loka_jax import predict as predictions
from loka_jax.train import session
from tests.support.configs import tiny, tiny_config

PATH = pathlib.Path


@pytest.fixture
def passed_on(monkeypatch, run):
    """Returns a function from a command line to what is called with it, and its end."""

    def passed_on(command, *line):
        seen, unwound = {}, []
        sizes = {"weight_bytes": {"float32": 4000}, "num_bytes": 123456}
        ended = dict(
            step=1234, calibration=None, differences={1: 0.0, 1024: 0.0125}, **sizes
        )

        def keep(*of, **given):
            seen.update(dict(zip(("workdir", "out"), of, strict=False)), **given)
            return SimpleNamespace(**ended)

        def score_file(predictor, path, out, *, progress, **given):
            assert predictor.step == 1234 and progress is predict._show
            seen.update(path=path, out=out, **given)
            columns = {"user": {"oov": 3, "missing": 1}}
            return predictions.Scored(
                3000, 2, 1.5, {"columns": columns}, ("all unknown",)
            )

        monkeypatch.setattr(predictions, "load", keep)
        monkeypatch.setattr(predictions, "score_file", score_file)
        monkeypatch.setattr(exports, "export_run", keep)
        monkeypatch.setattr(options, "unwind_on_sigterm", lambda: unwound.append(1))
        code, out, err = run(command, *line)
        assert (code, err, unwound) == (0, "", [1])
        return seen, out.splitlines()

    return passed_on


def test_predict(passed_on):
    line = ["--workdir", "run", "--out", "s.csv", "--data.path", "new.csv"]
    seen, said = passed_on(predict, *line)
    expected = {"workdir": PATH("run"), "plan": "saved", "shards": 1, "keys": ()}
    expected |= {"path": "new.csv", "out": PATH("s.csv"), "where": None}
    assert seen == expected
    assert said == [
        "Reading run ...",
        "Scoring with the weights of step 1,234.",
        "2 rows with a wrong number of columns left out.",
        "user: 3 not in the vocabulary, 1 missing",
        "all unknown",
        "3,000 rows scored in 1.5 s (2,000 rows a second, compiling included): s.csv",
    ]
    line += ["--plan", "off", "--mesh.shards", "4", "--data.keys", "item", "user"]
    effect = {"plan": "off", "shards": 4, "keys": ("item", "user")}
    assert passed_on(predict, *line)[0] == expected | effect


def test_export(passed_on):
    line = ["--workdir", "run", "--out", "m"]
    seen, said = passed_on(export, *line)
    expected = {"workdir": PATH("run"), "out": PATH("m"), "plan": "auto"}
    expected |= {"batch_sizes": (), "platforms": ("cpu", "cuda")}
    assert seen == expected
    assert said[1:] == [
        "1 row: equal bit for bit to the run's evaluation step here.",
        "1,024 rows: NOT equal to the run's evaluation step here (by at most 0.013).",
        "m: 123,456 bytes; of weights: 4,000 float32.",
    ]
    line += ["--batch-sizes", "8", "2", "--platforms", "cuda", "--plan", "off"]
    effect = {"batch_sizes": (8, 2), "platforms": ("cuda",), "plan": "off"}
    assert passed_on(export, *line)[0] == expected | effect


TINY = ["--config", tiny_config("fp8_dlrm")]


@pytest.mark.parametrize("code", [0, 1])
def test_train(monkeypatch, run, code):
    seen = []
    done = SimpleNamespace(exit_code=code)
    monkeypatch.setattr(session, "train", lambda *of: seen.append(of) or done)
    arguments = [*TINY, "--seed", "3", "--plan", "off", "--loop.epochs", "7"]
    assert run(train, *arguments)[0] == code
    ((config, given),) = seen
    assert given == arguments
    expected = tiny("fp8_dlrm")
    loop = dataclasses.replace(expected.loop, epochs=7)
    assert config == dataclasses.replace(expected, seed=3, plan="off", loop=loop)


def test_every_option_of_a_run_is_read_beside_the_class_that_has_it():
    read = set()
    for path in PATH(loka_jax.__path__[0]).rglob("*.py"):
        read |= set(re.findall(r"(?<!self)\.(\w+)\b", path.read_text()))

    def fields(config):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            yield field.name
            if dataclasses.is_dataclass(value) and field.name != "model":
                yield from fields(value)

    names = {*fields(configs.get_config("fp8_dlrm"))}
    own = {"hash_sizes", "hash_buckets", "multi_weights"}
    assert len(names) > 80 and names - read == own


def test_probe(monkeypatch, run, tmp_path):
    seen, ended = [], SimpleNamespace(run="run", state="state", workdir=tmp_path)

    def train(config, arguments, console, *, script):
        seen.append((config, arguments, script))
        return ended

    monkeypatch.setattr(probe, "train", train)
    ended.exit_code = 143
    assert run(probe, *TINY, "--workdir", tmp_path / "new")[0] == 143
    ended.exit_code = 0
    surveyed, pages = [], []
    result = {"warnings": ["a: few rows"]}
    monkeypatch.setattr(probe, "survey", lambda *of: surveyed.append(of) or result)
    page = lambda *of: pages.append(of) or of[0]  # noqa: E731
    monkeypatch.setattr(probe, "write_survey_page", page)
    (tmp_path / "amaxes.jsonl").write_text('{"step": 1, "a/lhs": 2.0}\n')
    options = ["--survey.pairs", "5", "--seed", "4", "--mesh.replicas", "2"]
    arguments = [*TINY, "--workdir", str(tmp_path / "new"), *options]
    code, out, _ = run(probe, *arguments)
    _, (config, given, script) = seen
    assert (code, given, script) == (0, arguments, "probe.py")
    assert (config.seed, config.probe.every, config.run.resume) == (4, 1, False)
    assert (config.mesh.replicas, config.mesh.shards) == (1, 1)
    assert "Probe runs on one device" in out and "Too few statistics: a: few" in out
    ((_, state, survey, _),) = surveyed
    saved = jsonfile.read(tmp_path / "probe.json")
    assert saved["command"].startswith("python experiments/probe.py --config /")
    amaxes = [{"step": 1, "a/lhs": 2.0}]
    assert (state, survey.pairs) == ("state", 5)
    assert pages == [(tmp_path / "probe.html", saved, amaxes)]


def test_evaluate(run, monkeypatch, tmp_path):
    asked = []

    def evaluate_files(*arguments, **options):
        asked.append((arguments[1:], options))
        numbers = {"rows": 9, "clicks": 4, "auc": None, "logloss": 0.5, "ne": 0.9}
        numbers |= {"ne_half": 0.1, "calibration": 1.0}
        groups, irregular = {"at": {"click": numbers}}, {"price": {"oov": 3, "nan": 1}}
        return predictions.Evaluated({"click": numbers}, groups, irregular)

    stand_in = SimpleNamespace(step=7, calibration=None)
    monkeypatch.setattr(predictions, "load", lambda workdir: stand_in)
    monkeypatch.setattr(predictions, "evaluate_files", evaluate_files)
    monkeypatch.setattr(options, "unwind_on_sigterm", lambda: None)
    line = ["--workdir", "run", "--data.path", "a", "b", "--by", "country"]
    out = tmp_path / "e.json"
    code, said, _ = run(evaluate, *line, "--out", out)
    assert code == 0
    assert asked == [
        ((("a", "b"),), {"where": None, "by": ("country",), "within": None, "k": 10})
    ]
    numbers = "AUC n/a  log loss 0.50000  NE 0.90000 ± 0.10000  calibration 1.0000"
    assert f"click: {numbers}  (9 rows, 4 of label 1)\n  at: {numbers}" in said
    assert "\nprice: 3 not in the vocabulary, 1 nan\n" in said
    assert json.loads(out.read_text())["groups"]["at"]["click"]["rows"] == 9
