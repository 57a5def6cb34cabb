"""What commands print, and end with."""

import contextlib
import importlib
import io
import os
import pathlib
import subprocess
import time

ROOT = pathlib.Path(__file__).parents[2]


def printed_by(name, *arguments):
    """Returns what `loka NAME` prints in this process, which must end well."""
    main = importlib.import_module(f"experiments.{name}").main
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        assert main([str(argument) for argument in arguments]) == 0, out.getvalue()
    return out.getvalue()


def signalled(command, number, folder, pattern):
    """Returns code and errors of a command that gets a signal once a file is there."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    while not list(folder.glob(pattern)):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(number)
    _, errors = process.communicate()
    return process.returncode, errors


def assert_refused(result, *parts):
    """Asserts exit code 2 and one sentence on a line of its own.

    Args:
        result: exit code, standard output and error.
        parts: of the sentence.
    """
    code, _, err = result
    assert code == 2, err
    assert "Traceback" not in err
    for part in parts:
        assert part in err, err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert err.endswith((".\n", "?\n")), err
