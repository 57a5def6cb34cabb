"""The command `loka`: `loka train --config fp8_dlrm`, or `python -m loka_jax.commands`.

A command is a script of `experiments/`, and runs as `python experiments/train.py` does.
A wheel has the scripts in a folder of their own, which only the process of a command
imports from, so that `experiments` remains the name of a user's own folder.

Exit codes: those of the script; 2 if there is no such command.
"""

import ast
import os
import pathlib
import re
import runpy
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import loka_jax
from loka_jax.options import did_you_mean
from loka_jax.terminal import printable

_IN_WHEEL = pathlib.Path(__file__).parent / "scripts" / "experiments"
_IN_CHECKOUT = pathlib.Path(__file__).parents[1] / "experiments"
_PAUSE_S = 0.01  # before a signal is sent again


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that a command line names, and returns the exit code."""
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"loka_jax {loka_jax.__version__}")
        return 0
    if name not in names():
        hint = did_you_mean(name, names())
        wrong = f"there is no command {name!r}{hint}: use" if name else "use"
        print(
            f"error: {printable(wrong)} one of {', '.join(names())}.", file=sys.stderr
        )
        return 2
    script = folder() / f"{name}.py"
    sys.path.insert(0, str(folder().parent))
    sys.argv = [str(script), *rest]
    leave_on_interrupt()
    runpy.run_path(str(script), run_name="__main__")
    return 0


def leave_on_interrupt() -> None:
    """Makes Ctrl-C end the process at once, with code 130, until `interruptible`.

    While extension modules are imported, an exception becomes another or is lost.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def interruptible() -> None:
    """Makes Ctrl-C a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def unwind_on_sigterm() -> None:
    """Makes SIGTERM end the process with code 143, without its temporary files.

    It becomes a SystemExit, so what removes them runs.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.unraisablehook = _send_again


def _send_again(ignored: Any) -> None:
    """Sends a signal again whose exception Python ignored, as it does in finalizers."""
    numbers = {SystemExit: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}
    if number := numbers.get(ignored.exc_type):
        threading.Timer(_PAUSE_S, os.kill, (os.getpid(), number)).start()
    else:
        sys.__unraisablehook__(ignored)


def _leave(*_) -> None:
    os._exit(130)  # nothing is written yet


def folder() -> pathlib.Path:
    """Returns the folder of the scripts."""
    return _IN_WHEEL if _IN_WHEEL.exists() else _IN_CHECKOUT


def names() -> list[str]:
    """Returns the names of all commands."""
    scripts = sorted(folder().glob("*.py"))
    return [path.stem for path in scripts if "\ndef main(" in path.read_text("utf-8")]


def run_by_python(command: Sequence[str]) -> list[str]:
    """Returns the arguments of Python that run a script, or a command of `loka`."""
    first, *rest = command
    if first in names() and not pathlib.Path(first).exists():
        return ["-m", "loka_jax.commands", *command]
    return [first, *rest]


def as_commands(text: str) -> str:
    """Returns a text that names scripts with the commands that run them here.

    A wheel has no `python experiments/train.py`; it has `loka train`.
    """
    if not _IN_WHEEL.exists():
        return text
    return re.sub(r"(?:uv run )?(?:python )?\bexperiments/(\w+)\.py", r"loka \1", text)


def command(script: str) -> str:
    """Returns how a script of `experiments/` is called here: "loka train", say."""
    return as_commands(f"python experiments/{script}")


def _help() -> str:
    lines = ["usage: loka COMMAND [--option value ...]", ""]
    for name in names():
        source = (folder() / f"{name}.py").read_text("utf-8")
        summary = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
        lines.append(f"  {name:12} {summary}")
    return "\n".join([*lines, "", "loka COMMAND --help explains a command."])


if __name__ == "__main__":
    sys.exit(main())
