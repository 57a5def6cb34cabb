"""experiments/convert.py: exit codes, one sentence, nothing half-written."""

import json
import signal
import sys

import pytest

from experiments import convert
from tests.support.data import HEADER, criteo_line, rows_text, write


@pytest.fixture(autouse=True)
def _no_handlers(monkeypatch):
    """Leaves the signals of this process as they are."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def test_criteo_file_is_converted_and_verified(tmp_path, capsys):
    text = "".join(criteo_line(str(i % 2)) for i in range(60))
    path = write(tmp_path / "train.txt", text)
    out = str(tmp_path / "shards")
    command = ["--data.kind", "criteo", "--data.path", path, "--out", out]
    assert convert.main(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["examples"]["train"] + report["examples"]["valid"] == 60
    assert report["vocab_sizes"] == [2] * 26 and "splits" not in report
    assert convert.main(["--verify", out]) == 0
    (tmp_path / "shards" / "train.records").write_bytes(b"junk")
    assert convert.main(["--verify", out]) == 2


CLICKS = ["--data.path", "PATH/clicks.csv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (CLICKS, "--out is missing: name a new folder."),
        (["--data.path", "PATH/clikcs.csv", "--out", "OUT"], "mean 'clicks.csv'?"),
        ([*CLICKS, "--data.dense", "x", "--out", "OUT"], "only click, price, age"),
        (["--out", "OUT", "--data.kind", "generated"], "needs no conversion"),
        (["--path", "x", "--out", "OUT"], "did you mean --data.path"),
        (["--verify", "PATH"], "manifest.json cannot be used"),
    ],
)
def test_wrong_arguments_exit_with_two_and_one_sentence(
    tmp_path, capsys, arguments, message
):
    write(tmp_path / "clicks.csv", HEADER + rows_text(50))
    text = " ".join(arguments).replace("OUT", str(tmp_path / "out"))
    with pytest.raises(SystemExit) as ended:
        sys.exit(convert.main(text.replace("PATH", str(tmp_path)).split()))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["clicks.csv"]
