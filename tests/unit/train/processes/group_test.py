"""How a process finds the others of its run."""

import os

import jax
import numpy as np
import pytest

from loka_jax.launch.processes import Job, environment_of
from loka_jax.train.processes import group
from loka_jax.train.processes.group import (
    Processes,
    connection,
    hosts,
    leave,
    per_host,
    start,
)

TORCHRUN = {
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
}


OF_TORCHRUN = {
    "coordinator_address": "10.0.0.7:29500",
    "num_processes": 8,
    "process_id": 5,
    "local_device_ids": [1],
}


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, None),
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),  # a shell in an allocation
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4"}, {}),  # JAX reads the variables itself
        (TORCHRUN, OF_TORCHRUN),
        (  # The port is that of its own store.
            TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"},
            OF_TORCHRUN | {"coordinator_address": "10.0.0.7:29501"},
        ),
    ],
)
def test_a_process_connects_as_its_environment_says(environment, expected):
    assert connection(environment) == expected


def test_processes_of_a_host_and_hosts_are_counted(monkeypatch):
    assert per_host({}) == per_host({"SLURM_STEP_TASKS_PER_NODE": "1"}) == 1
    assert per_host({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}) == 4
    assert per_host({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}) == 8
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    assert hosts({"LOCAL_WORLD_SIZE": "4"}) == 2 and hosts({}) == 8
    assert hosts({"LOCAL_WORLD_SIZE": "16"}) == 1


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


# 143 is of a run that all processes have saved: they end together.
@pytest.mark.parametrize(
    "several, main, ends, code",
    [
        (True, lambda: 2, Left, 2),
        (True, lambda: fail(KeyError("a bug")), Left, 1),
        (True, lambda: fail(SystemExit(130)), Left, 130),
        (True, lambda: 0, SystemExit, 0),
        (True, lambda: 143, SystemExit, 143),
        (False, lambda: 2, SystemExit, 2),
    ],
)
def test_one_of_several_processes_that_fails_does_not_wait(
    monkeypatch, several, main, ends, code
):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: several)
    monkeypatch.setattr(os, "_exit", lambda code: fail(Left(code)))
    with pytest.raises(ends) as end:
        leave(main)
    assert end.value.args == (code,)


def test_a_process_connects_once_and_notices_a_death_soon(monkeypatch):
    connected = []
    monkeypatch.setattr(group, "connection", lambda environment: {"process_id": 1})
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda **options: connected.append(options)
    )
    for is_connected in (False, True):
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda x=is_connected: x)
        assert start() == Processes(1, 2)
    assert connected == [{"process_id": 1, "heartbeat_timeout_seconds": 20}]


def test_all_processes_get_the_text_of_the_first(monkeypatch):
    first = "gr\u00f6!".encode()  # five bytes
    told = iter([np.int32(len(first)), np.frombuffer(first, np.uint8)])
    given = []

    def broadcast(value):
        given.append(np.shape(value))
        return next(told)

    monkeypatch.setattr(group, "broadcast_one_to_all", broadcast)
    assert Processes(1, 2).same("a text of another length") == "gr\u00f6!"
    assert given == [(), (5,)]  # all must give arrays of the same size
