import pytest

from loka_jax.terminal import printable


@pytest.mark.parametrize("text", ["", "pläne/[b]x[/b] 表 :smile:", "a%s {x}"])
def test_text_stays_as_it_is(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    "text, shown",
    [
        ("\x1b[2J\x1b]0;x\x07", r"\x1b[2J\x1b]0;x\x07"),
        ("a\r\nerror: b", r"a\r\nerror: b"),
        ("\x9b1A\x00", r"\x9b1A\x00"),
        ("\u202egpj.exe", r"\u202egpj.exe"),  # would be shown from right to left
        ("\udcff", r"\udcff"),  # a byte of a file name that is not UTF-8
    ],
)
def test_what_a_terminal_obeys_becomes_an_escape(text, shown):
    assert printable(text) == shown
