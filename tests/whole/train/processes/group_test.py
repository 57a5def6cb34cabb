"""How a process finds the others of its run."""

import os

import jax
import pytest

from loka_jax.launch.processes import Job, environment_of
from loka_jax.train.processes.group import Processes, connection, leave, per_host, start

TORCHRUN = {
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
}


def test_a_process_alone_connects_to_nobody():
    assert connection({}) is None
    assert connection({"WORLD_SIZE": "1", "RANK": "0"}) is None
    # Of an allocation, and of a shell in it, with one task.
    assert connection({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}) is None
    assert connection({"SLURM_STEP_NUM_TASKS": "1"}) is None
    assert start() == Processes(0, 1)
    assert Processes().same("text") == "text"


def test_variables_of_torchrun_are_understood():
    assert connection(TORCHRUN) == {
        "coordinator_address": "10.0.0.7:29500",
        "num_processes": 8,
        "process_id": 5,
        "local_device_ids": [1],
    }


def test_the_port_of_torchruns_own_store_is_left_to_it():
    found = connection(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"})
    assert found is not None and found["coordinator_address"] == "10.0.0.7:29501"


def test_jax_reads_the_variables_of_srun_itself():
    assert connection({"SLURM_STEP_NUM_TASKS": "4"}) == {}


def test_processes_of_a_host_are_counted():
    assert per_host({}) == per_host({"SLURM_STEP_TASKS_PER_NODE": "1"}) == 1
    assert per_host({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}) == 4
    assert per_host({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}) == 8


def test_what_the_launcher_sets_is_understood_and_stays_on_this_machine(tmp_path):
    job = Job(command=("x.py",), processes=4, logs=tmp_path)
    found = connection(environment_of(job, 3, 4567, {"WORLD_SIZE": "9"}))
    assert found == {
        "coordinator_address": "127.0.0.1:4567",
        "coordinator_bind_address": "127.0.0.1:4567",
        "num_processes": 4,
        "process_id": 3,
        "local_device_ids": [3],
    }


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_PORT"])
def test_a_missing_variable_is_named(name):
    rest = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(ValueError, match=f"^{name} is None .* loka_jax.launch"):
        connection(rest)


class Left(Exception):
    """Stands for the immediate end of the process."""


def fail(error):
    raise error


@pytest.mark.parametrize(
    "main, code",
    [
        (lambda: 2, 2),
        (lambda: 1, 1),
        (lambda: fail(KeyError("a bug")), 1),
        (lambda: fail(SystemExit(130)), 130),
    ],
    ids=["usage", "failure", "bug", "signal"],
)
def test_one_of_several_processes_that_fails_does_not_wait(monkeypatch, main, code):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", lambda code: fail(Left(code)))
    with pytest.raises(Left) as left:
        leave(main)
    assert left.value.args == (code,)


# 143 is of a run that all processes have saved: they end together.
@pytest.mark.parametrize("several, code", [(True, 0), (True, 143), (False, 2)])
def test_a_process_that_is_waited_for_by_none_ends_as_usual(monkeypatch, several, code):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: several)
    with pytest.raises(SystemExit) as end:
        leave(lambda: code)
    assert end.value.code == code
