"""The planner's command: meshes, a simulation, and what does not fit."""

import functools
import json

from experiments import plan
from tests.support.configs import tiny_config

TINY = ["--config", tiny_config("fp8_dlrm")]


def test_it_prints_every_mesh_and_simulates_thousands_of_gpus(capsys):
    assert plan.main([*TINY, "--gpus", "8"]) == 0
    printed = capsys.readouterr().out
    meshes = ("1 x 8", "2 x 4", "4 x 2", "8 x 1")
    assert all(f"\n{mesh} " in printed for mesh in meshes)
    assert plan.main([*TINY, "--simulate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == [str(2**k) for k in range(13)]
    shares = [float(line.split()[-1].rstrip("%")) for line in lines[3:]]
    assert shares[0] == 100 and all(0 < share <= 100 for share in shares)


def test_options_change_what_is_planned(monkeypatch, tmp_path):
    plain, asked = plan.workload_of, []
    monkeypatch.setattr(plan, "schema_of", functools.cache(plan.schema_of))

    def workload_of(config, schema, batch, dense_us):
        asked.append((batch, dense_us))
        return plain(config, schema, batch, dense_us)

    monkeypatch.setattr(plan, "workload_of", workload_of)
    size = ["--loop.batch-size", "256"]
    plan.main([*TINY, *size, "--gpus", "4", "--dense-us", "1e6"])
    plan.main([*TINY, *size, "--gpus", "4", "--simulate"])
    assert asked == [(64, 1e6), (256, None)]
    times = []
    for rate in ("300", "0.001"):
        out = tmp_path / f"{rate}.json"
        plan.main([*TINY, "--gpus", "4", "--rates.link-gb-s", rate, "--out", str(out)])
        saved = json.loads(out.read_text())
        times.append([mesh["step_us"] for mesh in saved["meshes"]])
        assert saved["rates"]["link_gb_s"] == float(rate)
    assert all(slow > fast for fast, slow in zip(*times, strict=True))
