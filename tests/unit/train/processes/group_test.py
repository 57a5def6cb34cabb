"""How a process finds the others of its run."""

import os
from unittest import mock

import jax
import numpy as np
import pytest

from loka_jax.dispatch import processes as agreed
from loka_jax.train.processes import group
from loka_jax.train.processes.group import (
    Processes,
    connection,
    hosts,
    leave,
    start,
)

TORCHRUN = dict(MASTER_ADDR="10.0.0.7", MASTER_PORT="29500")
TORCHRUN |= dict(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1")
RUN = dict(coordinator_address="10.0.0.7:29500")
RUN |= dict(num_processes=8, process_id=5, local_device_ids=[1])


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({}, None),
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),  # a shell in an allocation
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4"}, {}),  # JAX reads the variables itself
        (TORCHRUN, RUN),
        (  # The port is that of its own store.
            TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"},
            RUN | {"coordinator_address": "10.0.0.7:29501"},
        ),
    ],
)
def test_a_process_connects_as_its_environment_says(monkeypatch, environment, expected):
    monkeypatch.setattr(os, "environ", environment)
    assert connection() == expected


def test_hosts_are_counted(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    for environment, count in (
        ({}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),4"}, 2),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}, 2),
        ({"LOCAL_WORLD_SIZE": "16"}, 1),
    ):
        monkeypatch.setattr(os, "environ", environment)
        assert hosts() == count


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_PORT"])
def test_a_missing_variable_is_named(monkeypatch, name):
    rest = {key: value for key, value in TORCHRUN.items() if key != name}
    monkeypatch.setattr(os, "environ", rest)
    with pytest.raises(ValueError, match=f"^{name} is None .* loka_jax.launch"):
        connection()


# 143 is of a run that all processes have saved: they end together.
@pytest.mark.parametrize(
    "several, main, waits, code",
    [
        (True, {"return_value": 2}, False, 2),
        (True, {"side_effect": KeyError("a bug")}, False, 1),
        (True, {"side_effect": SystemExit(130)}, False, 130),
        (True, {"return_value": 0}, True, 0),
        (True, {"return_value": 143}, True, 143),
        (False, {"return_value": 2}, False, 2),
    ],
)
def test_processes_wait_for_each_other_if_they_have_not_failed(
    monkeypatch, several, main, waits, code
):
    disconnect = mock.Mock()
    monkeypatch.setattr(group, "_disconnect", disconnect)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: several)
    end = mock.Mock(side_effect=InterruptedError)  # stands for the immediate end
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(InterruptedError if several else SystemExit) as ended:
        leave(mock.Mock(**main))
    assert (end.call_args or ended.value).args == (code,)
    assert disconnect.called == waits


def test_a_process_connects_once_and_notices_a_death_soon(monkeypatch):
    initialize = mock.Mock()
    monkeypatch.setattr(group, "connection", lambda: {"process_id": 1})
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for is_connected in (False, True):
        monkeypatch.setattr(jax.distributed, "is_initialized", lambda x=is_connected: x)
        assert start() == Processes(1, 2)
    initialize.assert_called_once_with(process_id=1, heartbeat_timeout_seconds=20)


def test_all_processes_get_the_text_of_the_first(monkeypatch):
    first = "gr\u00f6!".encode()  # five bytes
    told = [np.int32(len(first)), np.frombuffer(first, np.uint8)]
    broadcast = mock.Mock(side_effect=told)
    monkeypatch.setattr(agreed, "broadcast_one_to_all", broadcast)
    assert Processes(1, 2).same("a text of another length") == "gr\u00f6!"
    # All must give arrays of the same size.
    assert [np.shape(call.args[0]) for call in broadcast.mock_calls] == [(), (5,)]
