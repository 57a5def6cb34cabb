"""What docs/mistakes.md says of each mistake is what the command says."""

import re

import pytest

from tests.support.commands import assert_refused
from tests.support.refused_lines import LINES, PAGE, folder, page, row, run

HINT = "Run `python -m tests.support.refused_lines` if that is right."


@pytest.fixture(scope="module")
def here():
    with folder() as path:
        yield path


@pytest.mark.parametrize("line", LINES)
def test_a_mistake_is_one_sentence_and_leaves_nothing(here, line):
    before = sorted(here.rglob("*"))
    code, said = run(line)
    assert_refused((code, "", said))
    assert not re.search(r"[.?!] [A-Z]", said), said
    assert row(line, said) in PAGE.read_text(), f"{said}{HINT}"
    assert sorted(here.rglob("*")) == before


def test_the_page_shows_these_mistakes_alone():
    shown = re.findall(r"^\| `(.*?)` \| (.*) \|$", PAGE.read_text(), re.M)
    assert PAGE.read_text() == page(dict(shown))
