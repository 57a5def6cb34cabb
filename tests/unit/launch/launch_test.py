"""How a job of several processes is started, judged and ended; none is started here."""

import shlex
import signal
from unittest import mock

import pytest

from loka_jax.launch import supervisor as supervisor_lib
from loka_jax.launch.job import WORKDIR, Job
from loka_jax.launch.supervisor import End, Supervisor, describe_end, to_blame


def job_of(logs, command=("train.py", "--seed", "1"), **options):
    return Job(command=command, processes=3, logs=logs, **options)


@pytest.mark.parametrize(
    "codes, stopping, rank",
    [
        ((None, 0, None), False, None),
        ((0, 3, 1), False, 1),
        ((-signal.SIGABRT, 1, -signal.SIGKILL), False, 2),
        ((-signal.SIGABRT, None, 1), False, 2),
        ((0, -signal.SIGABRT), False, 1),
        ((143, 130, None), False, None),  # saved on a signal to one of them
        ((-signal.SIGINT, -signal.SIGABRT), True, None),
        ((-signal.SIGTERM, None), False, 0),
        ((-signal.SIGINT, -signal.SIGSEGV), True, 1),
    ],
)
def test_the_process_to_blame_is_the_one_that_died_first(codes, stopping, rank):
    assert to_blame(codes, is_stopping=stopping) == rank


def children(*codes, started=True):
    """Stands for processes, with the exit codes at each time that they are asked."""
    made = mock.Mock(codes=[*codes])
    made.exit_codes.side_effect = made.codes
    made.stopped_ranks.return_value = [1]
    made.are_started.return_value = started
    return made


@pytest.fixture
def supervised(monkeypatch):
    """Returns how a job of children ends; a second passes between two looks."""
    handlers, seconds = {}, iter(range(1000))
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(supervisor_lib.time, "sleep", lambda _: None)
    monkeypatch.setattr(supervisor_lib.time, "monotonic", lambda: next(seconds))

    def run(children, *signals, grace_s=3.0):
        supervisor = Supervisor(children, grace_s)
        assert handlers.keys() == {signal.SIGINT, signal.SIGTERM}
        for number in signals:
            handlers[number](number, None)
        return supervisor.wait()

    return run


@pytest.mark.parametrize(
    "codes, end",
    [
        ((0, 0), End(0)),
        ((143, 0), End(143)),  # one was told to stop, and all saved
        ((130, 143), End(143)),
        ((None, 1), End(1, 1, 1, (1,))),
        ((0, 2), End(2, 1, 2, (1,))),  # its user can mend that
        ((None, -9), End(1, 1, -9, (1,))),
    ],
)
def test_a_job_ends_as_its_processes_do(supervised, codes, end):
    assert supervised(children([None, None], codes)) == end


TOLD = mock.call.send(signal.SIGINT)  # SIGTERM is JAX's


@pytest.mark.parametrize(
    "signals, codes, code, told",
    [
        ((signal.SIGTERM,), ([130, None], [130, 0]), 143, [TOLD]),
        ((signal.SIGTERM, signal.SIGINT), (), 143, [TOLD, mock.call.kill()]),
    ],
    ids=["passed on", "kills"],
)
def test_the_first_signal_decides_the_code_and_a_second_kills(
    supervised, signals, codes, code, told
):
    made = children([None, None], *codes)
    assert supervised(made, *signals) == End(code)
    assert [x for x in made.mock_calls if x[0] in ("send", "kill")] == told
    starting = children([None], started=False)
    assert supervised(starting, *signals[:1]) == End(code)
    starting.send.assert_not_called()


def test_those_left_behind_by_a_stopped_job_are_late(supervised):
    made = children(*[[None, None]] * 9, *[[130, None]] * 9)
    assert supervised(made, signal.SIGINT) == End(130, late=(1,))
    assert made.exit_codes.call_count == 14  # over three seconds after the first end


def ended(tmp_path, end, log=None, saved=(), **options):
    """Returns what is said of a job that has ended."""
    job, run = job_of(tmp_path, **options), tmp_path / "a run"
    for name in saved:
        (run / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / WORKDIR).write_text(str(run))
    if log is not None:
        job.log(end.rank).write_text(log)
    return describe_end(job, end)


def test_a_death_says_who_why_and_how_to_go_on(tmp_path):
    saved = ("4", "12", "16.damaged-1", ".unfinished")
    end = End(1, 1, -signal.SIGKILL)
    said = ended(tmp_path, end, "one\n\x1b[2Kstep 7\r\n \n", saved, cpu_devices=2)
    log, run = tmp_path / "rank-1.log", shlex.quote(str(tmp_path / "a run"))
    assert said == (
        f"rank 1 was killed by SIGKILL (its last line in {log} is 'step 7'); the "
        "newest checkpoint is step 12: go on with python -m loka_jax.launch "
        f"--processes 3 --cpu-devices 2 train.py --resume --workdir {run}"
    )


@pytest.mark.parametrize(
    "end, log, clause",
    [
        (End(1, 2, 3), "", "rank 2 ended with exit code 3 ("),
        (End(1, 0, -6), "0x12", "rank 0 was killed by SIGABRT (as JAX does to a"),
        (
            End(1, 0, 1, (1, 2)),
            "x",
            "rank 1 and rank 2 had been stopped (SIGSTOP), and",
        ),
        (End(2, 1, 2), "step\nerror: no such file.\n", "no such file."),
        (End(143, late=(1, 2)), None, "rank 1 and rank 2 did not end with the others"),
        (End(143), None, None),
        (End(2, 0, 2), None, None),  # the first has said it
    ],
)
def test_a_failure_is_named_with_its_cause(tmp_path, end, log, clause):
    said = ended(tmp_path, end, log)
    assert said is clause is None or said.startswith(clause)
