"""Mistakes on the command line: the lines, and the files they are about.

    python -m tests.support.refused_lines     # writes docs/mistakes.md

The page shows each line with what it prints, which tests/whole/refused_lines_test.py
runs.
"""

import contextlib
import importlib
import io
import json
import os
import pathlib
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import pyarrow as pa
from pyarrow import parquet

from loka_jax import commands
from loka_jax.launch import __main__ as launch
from tests.support import predict as support

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "mistakes.md"
COLUMNS = "--data.label click --data.categorical user --data.dense price"
CSV = f"loka train --config csv_dlrm {COLUMNS} --data.path"
TABLE = "loka train --config table --data.path"
RESUMED = "loka train --resume --workdir run"
PREDICT = "loka predict --workdir run --data.path new.csv --out"
EVALUATE = "loka evaluate --workdir run --data.path clicks.csv"
SWEEP = "loka sweep --config fp8_dlrm --space"
SEARCH = "loka search --config fp8_dlrm"
LAUNCH = "python -m loka_jax.launch --processes"

# By heading: lines, which run in the folder of `write_files`.
MISTAKES = {
    "Commands and configurations": (
        "loka trian --config fp8_dlrm",
        "loka train --config fp8_dlmr",
        "loka train --seed 3",
        "loka train --config table --model dlrn --data.path clicks.csv",
        "loka train --config table --model own:Mine --data.path clicks.csv",
        "loka train --config own.py:my_dlmr",
        "loka train --config settings.json",
        "loka probe --config fp8_dlmr",
        "loka plan --config fp8_dlrm --gpus 0",
        "loka time_sites --out sites.json --part 3 --parts 2",
    ),
    "Options": (
        "loka train --config fp8_dcnv2 --optm.lr 0.1",
        "loka train --config fp8_dcnv2 --loop.batch-size 1.5",
        "loka train --config fp8_dcnv2 --loop.batch-size 0",
        "loka train --config fp8_dcnv2 --optim.lr -1",
        "loka train --config fp8_dcnv2 --norm layers",
        "loka train --config fp8_dcnv2 --norm layer rms",
        "loka train --config fp8_dcnv2 --recipe fp8_rowise",
        "loka train --config fp8_interformer --num-heads 3",
        "loka train --config fp8_dcnv2 --plan table.json",
        "loka train --config fp8_dcnv2 --metrics f1=own:f2",
        "loka tune --config fp8_dcnv2 --table clicks.csv",
    ),
    "Data": (
        "loka train --config table",
        f"{TABLE} click.csv",
        f"{TABLE} 'logs/*.csv'",
        f"{TABLE} .",
        f"{TABLE} exported",
        f"{TABLE} empty.csv",
        f"{TABLE} header.csv",
        f"{TABLE} damaged.parquet",
        f"{TABLE} clicks.csv --data.label clicked",
        f"{TABLE} clicks.csv --data.categorical usr",
        f"{TABLE} yes_no.csv --data.label click",
        f"{CSV} clicks.csv --data.dense user --data.categorical price",
        f"{CSV} short.csv",
        f"{CSV} nan.csv --data.bad strict",
        f"{CSV} clicks.csv --data.weight age",
        f"{CSV} clicks.csv --data.transform log",
        f"{CSV} clicks.csv --embedding.dims usr=8",
        f"{TABLE} days --data.train 'dt<2020-01-01'",
        f"{TABLE} days --data.train 'dt=<2026-11-02'",
        f"loka convert {COLUMNS} --data.path clicks.csv --out days",
        "loka convert --verify days",
    ),
    "Folders of runs": (
        "loka train --config fp8_dcnv2 --workdir clicks.csv/run",
        "loka train --config fp8_dcnv2 --workdir run",
        f"{TABLE} clicks.csv --workdir run",
        "loka train --resume --workdir runs/week",
        f"{RESUMED} --optim.lr 0.5",
        "loka train --resume --workdir broken",
        "loka train --resume --workdir older",
        "loka train --init-from runs/week --data.path clicks.csv",
    ),
    "Predict, evaluate, compare": (
        "loka predict --workdir runs/week --data.path new.csv --out scores.parquet",
        "loka predict --workdir run --data.path new.csv",
        "loka predict --workdir run --data.path nwe.csv --out scores.parquet",
        "loka predict --workdir run --data.path header.csv --out scores.parquet",
        "loka predict --workdir run --data.path users.csv --out scores.parquet",
        "loka predict --workdir run --data.path short.csv --out scores.parquet",
        "loka predict --workdir older --data.path new.csv --out scores.parquet",
        f"{PREDICT} scores.txt",
        f"{PREDICT} nowhere/scores.parquet",
        f"{PREDICT} scores.parquet --data.keys session",
        f"{PREDICT} scores.parquet --data.where 'user=nobody'",
        f"{PREDICT} scores.parquet --plan of",
        f"{EVALUATE} --by country",
        f"{EVALUATE} --page page.pdf",
        f"{EVALUATE} --out nowhere/numbers.json",
        f"{EVALUATE} --k 0 --within user",
        "loka evaluate --workdir run --data.path new.csv",
        "loka compare run runs/week",
        "loka compare run clicks.csv",
        "loka compare run run",
        "loka compare run broken",
        "loka compare run older --json nowhere/numbers.json",
        "loka compare run older --out compare.pdf",
    ),
    "Export, serve, sweep, search, launch": (
        "loka export --workdir runs/week --out model",
        "loka export --workdir run --out days",
        "loka export --workdir run --out model --batch-sizes 0",
        "loka export --workdir run --out model --platforms gpu",
        "loka serve model",
        "loka serve exported --port 99999",
        "loka serve exported --port 8000",
        "loka serve exported --port http",
        "loka serve exported --max-rows 0",
        "loka sweep --config fp8_dlrm",
        f"{SWEEP} optim.lr=0.1:0.01",
        f"{SWEEP} optim.rate=0.01:0.1",
        f"{SWEEP} optim.lr=0.01:0.1 --trials many",
        f"{SWEEP} optim.lr=0.01:0.1 --workdir clicks.csv/sweep",
        f"{SEARCH} --space recipes",
        f"{SEARCH} --space mods=all",
        f"{SEARCH} --space batch-size=many",
        f"{SEARCH} --minutes 0",
        f"{SEARCH} --earlier clicks.csv",
        f"{SEARCH} --workdir clicks.csv/search",
        f"{LAUNCH} 0 train --config fp8_dlrm",
        f"{LAUNCH} two train --config fp8_dlrm",
        f"{LAUNCH} 2 --cpu-devices 1 --logs clicks.csv/logs train --config fp8_dlrm",
    ),
}
LINES = [line for lines in MISTAKES.values() for line in lines]
TEXT = """\
# Mistakes

What commands say of a mistake: one sentence on the error output, with exit code 2, and
nothing is written. The lines below run in a folder with `clicks.csv`, of the columns
click, user and price; `new.csv`, the same without click; `days`, a folder of partitions
`dt=2026-11-01` and `dt=2026-11-02`; and `run`, which was trained on `clicks.csv`. Port
8000 is taken.
"""


def write_files(folder: pathlib.Path) -> None:
    """Writes the files and folders that the lines name."""
    rows = [f"{i % 3 % 2},u{i % 7},{i / 3:.3f}\n" for i in range(200)]
    head = "click,user,price\n"

    def write(name: str, text: str) -> None:
        (folder / name).write_text(text)

    write("clicks.csv", head + "".join(rows))
    write("new.csv", "user,price\n" + "".join(row[2:] for row in rows[:9]))
    write(
        "yes_no.csv",
        head + "".join(("no,", "yes,")[i % 2] + row[2:] for i, row in enumerate(rows)),
    )
    write("short.csv", head + "".join(rows) + "1,u1\n")
    write("nan.csv", head + "".join(rows) + "1,u1,nan\n")
    write("empty.csv", "")
    write("users.csv", "user\nu1\nu2\n")
    write("header.csv", head)
    write("table.json", "{")
    write("settings.json", '{"name": 3}')
    write("own.py", "def my_dlrm():\n    pass\n")
    for day in (1, 2):
        (part := folder / "days" / f"dt=2026-11-0{day}").mkdir(parents=True)
        shutil.copy(folder / "clicks.csv", part / "part-0.csv")
    table = pa.table({"click": [0, 1] * 50, "price": [1.5] * 100})
    parquet.write_table(table, folder / "damaged.parquet")
    data = (folder / "damaged.parquet").read_bytes()
    (folder / "damaged.parquet").write_bytes(data[: len(data) // 2])
    _write_runs(folder)
    (folder / "exported").mkdir()
    write("exported/loader.py", "")


def _write_runs(folder: pathlib.Path) -> None:
    """Writes a run, one whose configuration is damaged, and one of another version."""
    run = support.config(
        folder,
        path="clicks.csv",
        label="click",
        categorical=("user",),
        dense=("price",),
    )
    assert support.support.train(run)[0] == 0
    shutil.rmtree(folder / "cache")
    shutil.copytree(folder / "run", folder / "broken")
    (folder / "broken" / "config.json").write_text("{")
    shutil.copytree(folder / "run", folder / "older")
    config = json.loads((folder / "older" / "config.json").read_text())
    (folder / "older" / "config.json").write_text(json.dumps(config | {"format": 1}))


def run(line: str) -> tuple[Any, str]:
    """Returns exit code and error output of a line, run in this process and folder.

    Paths in that folder have no prefix.
    """
    program, *words = shlex.split(line)
    if program == "python":
        main, words = launch.main, words[2:]
    elif words[0] in commands.names():
        main, words = importlib.import_module(f"experiments.{words[0]}").main, words[1:]
    else:
        main = commands.main
    errors = io.StringIO()
    # Messages name commands as those of a wheel do.
    wheel = mock.patch.object(commands, "_IN_WHEEL", commands._IN_CHECKOUT)
    with (
        wheel,
        contextlib.redirect_stderr(errors),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code
    return code, errors.getvalue().replace(f"{pathlib.Path.cwd()}/", "")


def row(line: str, said: str) -> str:
    """Returns the row of the page that shows a line, and what it says."""
    return f"| `{line}` | {said.removeprefix('error: ').strip()} |\n"


def page(said: Mapping[str, str]) -> str:
    """Returns the page, given what each line says."""
    parts = [TEXT]
    for heading, lines in MISTAKES.items():
        rows = "".join(row(line, said[line]) for line in lines)
        parts.append(f"\n## {heading}\n\n| line | says |\n|---|---|\n{rows}")
    return "".join(parts)


@contextlib.contextmanager
def folder() -> Iterator[pathlib.Path]:
    """Gives a folder with the files, as the current one, while port 8000 is taken."""
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory())
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.dict(os.environ, XDG_CACHE_HOME=cache))
        stack.enter_context(contextlib.chdir(path))
        # A line imports own.py.
        stack.enter_context(mock.patch.object(sys, "dont_write_bytecode", True))
        with contextlib.suppress(OSError):  # another process has it
            stack.enter_context(socket.create_server(("127.0.0.1", 8000)))
        write_files(pathlib.Path(path))
        yield pathlib.Path(path)


if __name__ == "__main__":
    with folder():
        PAGE.write_text(page({line: run(line)[1] for line in LINES}))
