"""The planner's command: meshes, a simulation, and what does not fit."""

import json

import pytest

from experiments import plan

TINY = ["--config", "fp8_dlrm_tiny"]


def test_it_prints_every_mesh(capsys, tmp_path):
    out = tmp_path / "plan.json"
    assert plan.main([*TINY, "--gpus", "8", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for mesh in ("1 x 8", "2 x 4", "4 x 2", "8 x 1"):
        assert f"\n{mesh} " in printed
    assert "16 examples a GPU" in printed and "fastest: " in printed
    saved = json.loads(out.read_text())
    assert len(saved["meshes"]) == 4
    assert saved["workload"]["batch"] == 16
    assert saved["meshes"][0]["why_not"] is None


def test_it_simulates_thousands_of_gpus(capsys):
    assert plan.main([*TINY, "--simulate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == [str(2**k) for k in range(13)]
    shares = [float(line.split()[-1].rstrip("%")) for line in lines[3:]]
    assert shares[0] == 100 and all(0 < share <= 100 for share in shares)


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--rates.memory-gb", "1e-6"], "fits no mesh of 8 GPUs"),
        (["--gpus", "3"], "--loop.batch-size 128 must be a multiple of --gpus 3"),
        (["--gpus", "0"], "--gpus 0 must be at least 1"),
        (["--dense-us", "-1"], "--dense-us -1.0 must be a time, at least 0"),
        (["--dense-us", "nan"], "--dense-us nan must be a time, at least 0"),
        (["--rates.memory-share", "7"], "--rates.memory-share 7.0 must be at most 1"),
        (["--rates.peer-us", "-1"], "--rates.peer-us -1.0 must be positive"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(options, sentence, capsys):
    assert plan.main([*TINY, *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
