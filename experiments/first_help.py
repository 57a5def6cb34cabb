"""`--help` before JAX is imported, which takes seconds: what most people need.

A script calls `first_help` before its other imports. All options and the defaults of a
configuration follow from the classes of the configuration, so they need those imports:
their text is kept for the next time, until a source file changes.
"""

import ast
import hashlib
import os
import pathlib
import shutil
import sys

import loka_jax
from experiments.arguments import asks_for_help, take
from loka_jax.cache_folder import cache_folder
from loka_jax.commands import leave_on_interrupt, spoken

# The options that most people need, with the same words in every script.
_OPTIONS = {
    "--config NAME": "the configuration: a name below, FILE.json from --print-config,\n"
    "or a function of your own, FILE.py:FUNCTION",
    "--data.path FILE": "your data: CSV, TSV, Parquet, or a folder of them; with\n"
    "--data.kind table or criteo",
    "--data.label NAME": "its columns: the label, ...",
    "--data.categorical A B": "... the categorical ...",
    "--data.dense X Y": "... and the dense ones",
    "--recipe NAME": "precision: bf16, f32, fp8_tensorwise, fp8_tensorwise_delayed,\n"
    "fp8_tensorwise_delayed_bf16_drhs, fp8_rowwise,\n"
    "fp8_rowwise_bf16_drhs, fp8_blockwise",
    "--plan PLAN": "what runs at each site: auto, off, tune, or a table of\n"
    "experiments/tune.py",
    "--loop.epochs N": "passes over the data; also --loop.max-steps, --loop.batch-size",
    "--optim.lr RATE": "learning rate; --optim.rows-lr is that of the tables",
    "--workdir FOLDER": "folder of the run; --resume --workdir FOLDER resumes it",
}
_OWN_OPTIONS = {
    "train.py": {},
    "plan.py": {
        "--gpus N": "number of GPUs, all meshes of which are shown",
        "--simulate": "instead, the fastest mesh of 1 to 4,096 GPUs",
        "--dense-us T": "measured time of a step without its tables",
        "--rates.* ...": "speeds of links and GPUs, and their memory",
        "--out FILE": "also writes the numbers as JSON",
    },
    "probe.py": {"--survey.* ...": "how candidates are measured"},
    "tune.py": {
        "--table FILE": "where the times and errors are written",
        "--tune.* ...": "how candidates are measured",
    },
}
_CONVERT = {
    "--out FOLDER": "the folder of shards to write",
    "--verify FOLDER": "checks a folder of shards; nothing is converted",
    **{name: text for name, text in _OPTIONS.items() if name.startswith("--data.")},
}
_FOLDER = pathlib.Path(__file__).parent


def first_help(arguments: list[str], script: str) -> None:
    """Answers `--help`, or says on a terminal that JAX is being loaded.

    Args:
        arguments: the command line.
        script: name of the script in experiments/.

    Raises:
        SystemExit: with code 0 if nothing is left to be said.
    """
    leave_on_interrupt()
    if not asks_for_help(arguments):
        if sys.stderr.isatty():
            print("Loading JAX ...", file=sys.stderr)
        return
    print(short_help(script), flush=True)
    name, _ = take(arguments, "--config")
    if name is None and script != "convert.py":
        raise SystemExit(0)
    rest = kept_help(script, name or "")
    if rest is not None:
        print(rest)
        raise SystemExit(0)
    if sys.stdout.isatty():
        print("Loading JAX for the other options ...", flush=True)


def short_help(script: str) -> str:
    """Returns the first part of a script's help."""
    if script == "convert.py":
        usage, options = "--data.path FILE --out FOLDER [--option value ...]", _CONVERT
    else:
        usage = "--config NAME [--option value ...]"
        options = _OPTIONS | _OWN_OPTIONS[script]
    lines = [f"usage: python experiments/{script} {usage}", ""]
    for name, text in options.items():
        first, *others = text.split("\n")
        lines += [f"  {name:23} {first}", *(" " * 26 + line for line in others)]
    if script != "convert.py":
        lines += ["", "configurations:"]
        lines += [f"  {name:23} {text}" for name, text in configurations().items()]
        lines += ["", "With --config NAME, --help lists all options and defaults."]
    return spoken("\n".join(lines))


def configurations() -> dict[str, str]:
    """Returns the first lines that describe the configurations, by name.

    Those for tests, `..._tiny`, share a line, and so do baselines in bfloat16.
    """
    return {
        name: text
        for name, text in _registered().items()
        if not (name.endswith("_tiny") or name.startswith("bf16_"))
    } | {
        "bf16_NAME": "the baseline in bfloat16 of many an fp8_NAME",
        "NAME_tiny": "a small form of each model, for a look in seconds",
    }


def _registered() -> dict[str, str]:
    """Returns what describes the registered configurations, read from their source."""
    descriptions = {}
    for path in sorted((_FOLDER / "configs").glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(mark, ast.Name) and mark.id == "register"
                for mark in node.decorator_list
            ):
                text = ast.get_docstring(node) or ""
                descriptions[node.name] = text.partition("\n")[0]
    return descriptions


def kept_help(script: str, config: str) -> str | None:
    """Returns the help on all options that `keep_help` kept, or None."""
    path = _kept_path(script, config)
    return path.read_text(encoding="utf-8") if path.exists() else None


def keep_help(script: str, config: str, text: str) -> None:
    """Keeps the help on all options until a source file changes.

    Args:
        script: name of the script in experiments/.
        config: name of the configuration; "" if the script has none.
        text: the help.
    """
    if config and config not in _registered():
        return  # a user's file may change at any time
    path = _kept_path(script, config)
    for old in path.parent.glob(f"{script}-{config}-*"):
        old.unlink(missing_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _kept_path(script: str, config: str) -> pathlib.Path:
    """Returns the file of a help; each width of the terminal and source has its own."""
    digest = hashlib.sha256(str(shutil.get_terminal_size().columns).encode())
    for folder in (_FOLDER, pathlib.Path(loka_jax.__path__[0])):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path} {path.stat().st_mtime_ns}".encode())
    name = pathlib.Path(config).name  # of a file, which is not kept
    return cache_folder("help") / f"{script}-{name}-{digest.hexdigest()[:16]}.txt"
