"""One sentence in place of the box that tyro prints for a bad value.

tyro says what is wrong on the standard error and exits with code 2; it has no public
way to ask for the reason. So its text is read, of which only the form of a box is taken
for granted: a title, lines, a rule, and what else there is. What is not known is said
in tyro's words, on one line.
"""

import ast
import contextlib
import io
import re
from collections.abc import Iterator

from loka_jax.options import did_you_mean

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_BORDER = " │╭╮╰╯"
_RULE = re.compile("[-─]{5,}")
# Of tyro's words for types: one value, and several.
_WORDS = {"INT": ("an integer", "integers"), "FLOAT": ("a number", "numbers")}


@contextlib.contextmanager
def one_sentence(prog: str) -> Iterator[None]:
    """Makes a ValueError of what tyro says of a command line before it exits.

    Args:
        prog: the command whose `--help` lists the options.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as ended:
        if ended.code != 2:
            raise
        raise ValueError(sentence(said.getvalue(), prog)) from None


def sentence(box: str, prog: str) -> str:
    """Returns what a box says, in one sentence with the remedy.

    Args:
        box: what tyro printed.
        prog: the command whose `--help` lists the options.
    """
    title, *lines = (line.strip(_BORDER) for line in _STYLE.sub("", box).splitlines())
    parts = [[]]
    for line in lines:
        if _RULE.fullmatch(line):
            parts.append([])
        elif line:
            parts[-1].append(line)
    reason, *others = [part for part in parts if part] or [[title]]
    text = " ".join(reason)
    if match := re.match(r"Error parsing (--[\w.-]+)\S*: (.*)", text):
        option, why = match.groups()
        kinds = [x for part in others for x in part if x.startswith(f"{option} ")]
        kind = _kind(kinds[0].partition(" ")[2]) if kinds else f"another value ({why})"
        return f"{' '.join([option, *_values(why)])} must be {kind}."
    if match := re.match(r"Error parsing [\w.-]+: (.*)", text):
        return match[1]  # of our own
    choice = r"invalid choice '(.*)' for argument '(.*)'\. .*?(\(.*\))"
    if match := re.match(choice, text):
        value, option, choices = match.groups()
        names = [str(name) for name in ast.literal_eval(choices)]
        hint = did_you_mean(value, names)
        return f"{option} is {value!r}: {hint}Use one of {', '.join(names)}."
    if match := re.match("Missing value for argument '(.*?)'", text):
        return f"{match[1]} lacks its value: add one, or leave it out."
    if missing := [line.split()[0] for line in reason if line.startswith("--")]:
        return f"{', '.join(missing)} must be given: {prog} --help says what they are."
    return f"{text.rstrip('.')}: {prog} --help lists the options."


def _values(why: str) -> list[str]:
    """Returns the values that a reason quotes, those of the command line."""
    return re.findall("'([^']*)'", why.partition("Got errors")[0])


def _kind(hint: str) -> str:
    """Returns the words for tyro's description of a type, as {None}|INT."""
    place = 0
    if several := re.match(r"\[(\S+) \[", hint):
        hint, place = several[1], 1
    names = (part.strip("{}") for part in hint.split("|"))
    return " or ".join(_WORDS.get(name, (name, name))[place] for name in names)
