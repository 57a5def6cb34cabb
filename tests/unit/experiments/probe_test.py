"""Which run `probe.py` observes or goes on with, and what it refuses."""

import dataclasses

import pytest

from experiments import probe as script
from experiments.cli import parse
from experiments.probe import observed
from loka_jax import saved_format
from tests.support.commands import assert_refused
from tests.support.configs import tiny_config

TINY = ["--config", tiny_config("fp8_dlrm"), "--workdir"]


@pytest.fixture
def begun(tmp_path):
    """Returns a function that leaves a run of an interval."""

    def begun(every):
        start = f'{{"{saved_format.KEY}": {saved_format.RUN}'
        text = f'{start}, "probe": {{"every": {every}}}}}'
        (tmp_path / "config.json").write_text(text)

    return begun


def test_a_run_goes_on_with_its_own_interval_and_a_new_one_has_the_default(
    begun, tmp_path
):
    at = parse([*TINY, str(tmp_path), "--data.examples", "64000"])
    new = observed(at)  # of 500 steps
    assert (new.probe.every, new.run.resume, new.run.workdir) == (10, False, tmp_path)
    probe = dataclasses.replace(at.probe, every=4)
    assert observed(dataclasses.replace(at, probe=probe)).probe.every == 4
    begun(7)
    found = observed(at)
    assert (found.probe.every, found.run.resume) == (7, True)
    assert (found.mesh.replicas, found.mesh.shards) == (1, 1)


def test_a_short_run_is_observed_often_enough(tmp_path):
    for examples, steps, every in ((2048, None, 1), (25600, None, 8), (25600, 100, 4)):
        line = [*TINY, str(tmp_path), "--data.examples", str(examples)]
        line += ["--loop.max-steps", str(steps)] if steps else []
        assert observed(parse(line)).probe.every == every
    frappe = parse(["--config", "frappe_dlrm", "--workdir", str(tmp_path)])
    assert observed(frappe).probe.every == 10  # its rows are not counted yet


@pytest.mark.parametrize("every", ["null", "0", '"x"', "true"])
def test_a_run_that_probe_did_not_observe_is_refused(every, begun, tmp_path, run):
    begun(every)
    why = "holds a run without statistics of its sites"
    assert_refused(run(script, *TINY, tmp_path), why)
