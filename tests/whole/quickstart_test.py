"""docs/quickstart.md: its script and commands run, and print what the page shows.

Words and whole numbers, which are counts of the data, are compared as they stand. Other
numbers follow from some hundred steps of training, which amplify the rounding of a CPU,
so that they have tolerances; steps are those at which an evaluation was the best. They
are far below what the page tells: a model that is 0.1 of NE ahead of the regression.
"""

import contextlib
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import textwrap
import urllib.request

import jax
import pytest
from pyarrow import parquet

from tests.support.commands import printed_by

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "quickstart.md"
TOLERANCE = 0.02
# Of the numbers after a word, where it is another one.
TOLERANCES = {"calibration": 0.05, "%": 2.0, '{"scores":': 0.1, "step": math.inf}
LIMIT_SECONDS = 300


def blocks(page):
    """Returns the indented parts of a page."""
    parts = re.findall(r"(?:^(?:    .*)?\n)+", page, re.MULTILINE)
    return [textwrap.dedent(part).strip("\n") for part in parts if part.strip()]


def pattern_of(shown):
    """Returns the pattern of what a page shows, and the tolerances of its groups.

    A page may break lines where there is a space. A line of `...` stands for any lines,
    and `...` within one for any part of it.
    """
    pattern, tolerances = "", []
    lines = [line.split() for line in shown.splitlines()]
    for words, following in zip(lines, [*lines[1:], ["..."]], strict=True):
        if words == ["..."]:
            pattern += r"(?:.*\n)*?\s*"
            continue
        tolerance, parts = TOLERANCE, []
        for word in words:
            name = word.strip("(")
            if name in TOLERANCES or name.isalpha():
                tolerance = TOLERANCES.get(name, TOLERANCE)
            number = r"\d[\d,]*" if tolerance == math.inf else r"\d+\.\d+"
            texts = re.split(f"({number})", word)
            tolerances += [tolerance] * len(texts[1::2])
            texts[::2] = [re.escape(x).replace(r"\.\.\.", ".*") for x in texts[::2]]
            texts[1::2] = [f"({number})" for _ in texts[1::2]]
            parts.append("".join(texts))
        end = r" *\n\s*" if following == ["..."] else r"\s+"
        pattern += r"\s+".join(parts) + end
    return pattern, tolerances


def difference(shown, printed):
    """Returns where what was printed differs from what a page shows, or None."""
    pattern, tolerances = pattern_of(shown)
    found, own = (re.fullmatch(pattern, text + "\n") for text in (printed, shown))
    assert own is not None, shown
    if found is None:
        return f"{first_missing(shown, printed)!r} is not in\n{printed}"
    pairs = zip(own.groups(), found.groups(), tolerances, strict=True)
    wrong = [x for x in pairs if abs(_number(x[0]) - _number(x[1])) > x[2]]
    return f"shown, printed, tolerance: {wrong}" if wrong else None


def first_missing(shown, printed):
    """Returns the first line of a page that does not go on with what was printed."""
    lines = shown.splitlines()
    for i, line in enumerate(lines):
        pattern, _ = pattern_of("\n".join(lines[: i + 1]))
        if re.match(pattern.removesuffix(r" *\n\s*"), printed) is None:
            return line
    return "the end"


def _number(text):
    return float(text.replace(",", ""))


class Terminal:
    """Runs commands of the page in this process, and the server in another."""

    def __init__(self, stack: contextlib.ExitStack):
        self._stack = stack
        self._address = ""

    def run(self, command):
        """Returns what a command prints."""
        program, *arguments = shlex.split(command)
        if program == "curl":
            return self._ask(*arguments)
        assert program == "loka"
        name, *options = arguments
        if name == "serve":
            return self._serve(options)
        return printed_by(name, *options)

    def _serve(self, options):
        *options, port = options
        assert port == "8000"  # which another process may have: any other is as good
        command = [sys.executable, "-m", "loka_jax.commands", "serve", *options, "0"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = self._stack.enter_context(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=environment
            )
        )
        self._stack.callback(process.terminate)
        assert process.stdout is not None
        line = process.stdout.readline()
        self._address = re.findall(r"http://\S+:\d+", line)[0]
        return re.sub(r":\d+", ":8000", line)

    def _ask(self, address, flag, body):
        assert address.startswith("localhost:8000/") and flag == "-d"
        url = f"{self._address}/{address.partition('/')[2]}"
        with urllib.request.urlopen(url, body.encode(), LIMIT_SECONDS) as answer:
            return answer.read().decode() + "\n"


def test_the_page_shows_what_its_commands_print(tmp_path, monkeypatch):
    if jax.default_backend() != "cpu":
        pytest.skip("the page shows what a CPU prints")
    monkeypatch.chdir(tmp_path)
    script, *rest = blocks(PAGE.read_text())
    exec(compile(script, PAGE.name, "exec"), {})
    with contextlib.ExitStack() as stack:
        terminal = Terminal(stack)
        for commands, shown in zip(rest[::2], rest[1::2], strict=True):
            lines = re.split(r"\n(?=\w)", commands.replace("\\\n", " "))
            printed = "".join(map(terminal.run, lines))
            assert difference(shown, printed) is None
    assert parquet.read_table("monday-scores.parquet").num_rows == 4_000


SHOWN = """\
Examples: 18,000 train; the last
  tenth.
...
test: NE 0.69080  calibration 0.9682  (step 1,128, the best)
monday minus week: NE % -4.52440 ± 1.92369, AUC +0.01486
9 rows scored in ...: scores.parquet"""


@pytest.mark.parametrize(
    "old, new, is_right",
    [
        ("", "", True),
        ("last\n  tenth", "last tenth", True),
        ("...\n", "", True),
        ("...\n", "step 7  NE 1.0\n\n  more\n", True),
        ("NE 0.69080", "NE 0.70180", True),
        ("NE 0.69080", "NE 0.71180", False),
        ("NE 0.69080", "NE nan", False),
        ("0.9682", "0.9282", True),
        ("step 1,128", "step 70", True),
        ("-4.52440 ± 1.92369", "-3.12440 ± 1.12369", True),
        ("+0.01486", "-0.01486", False),
        ("18,000", "18,001", False),
        ("last", "first", False),
        ("tenth.", "tenth. More", False),
        ("...:", "1.2 s (7 rows a second):", True),
        ("9 rows", "Warning: old.\n9 rows", False),
    ],
)
def test_a_page_that_shows_something_else_is_noticed(old, new, is_right):
    printed = SHOWN.replace(old, new) + "\n"
    assert (difference(SHOWN, printed) is None) == is_right
