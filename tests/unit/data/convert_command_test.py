"""experiments/convert.py: exit codes, one sentence, nothing half-written."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments import convert
from tests.support.data import HEADER, criteo_line, rows_text, write

SCRIPT = pathlib.Path(__file__).parents[3] / "experiments" / "convert.py"
COLUMNS = (
    "--data.label click --data.dense price age --data.categorical user item".split()
)


def run(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_criteo_file_is_converted_and_verified(tmp_path):
    text = "".join(criteo_line(str(i % 2)) for i in range(60))
    path = write(tmp_path / "train.txt", text)
    made = run(
        "--data.kind", "criteo", "--data.path", path, "--out", tmp_path / "shards"
    )
    assert made.returncode == 0, made.stderr
    report = json.loads(made.stdout)
    assert report["examples"]["train"] + report["examples"]["valid"] == 60
    assert run("--verify", tmp_path / "shards").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.path", "PATH/clicks.csv"], "--out is missing: name a new folder."),
        (
            ["--data.path", "PATH/clikcs.csv", "--out", "OUT"],
            "did you mean clicks.csv?",
        ),
        (["--data.path", "PATH/clicks.csv", "--out", "OUT"], "no features"),
        (
            ["--data.path", "PATH/clicks.csv", "--data.dense", "x", "--out", "OUT"],
            "only click, price, age",
        ),
        (["--out", "OUT", "--data.kind", "criteo"], "needs --data.path"),
        (["--out", "OUT", "--data.kind", "generated"], "needs no conversion"),
        (["--out", "OUT", "--data.min-count", "0"], "must lie between"),
        (["--out", "OUT", "--data.min-count", "x"], "min-count"),
        (["--path", "x", "--out", "OUT"], "did you mean --data.path"),
        (["--verify", "PATH"], "manifest.json cannot be used"),
    ],
)
def test_wrong_arguments_exit_with_two_and_one_sentence(
    tmp_path, monkeypatch, capsys, arguments, message
):
    write(tmp_path / "clicks.csv", HEADER + rows_text(50))
    places = {"PATH": str(tmp_path), "OUT": str(tmp_path / "out")}
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # of this process
    with pytest.raises(SystemExit) as ended:
        sys.exit(convert.main(arguments))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["clicks.csv"]


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_without_leaving_anything(tmp_path, signal_number):
    source = write(tmp_path / "clicks.csv", HEADER + rows_text(1_000_000))
    command = [sys.executable, str(SCRIPT), "--data.path", source, *COLUMNS]
    command += ["--out", str(tmp_path / "shards")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".shards.partial-*")):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal_number)
    _, stderr = process.communicate()
    assert process.returncode in (130, 143)
    assert "Traceback" not in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["clicks.csv"]
