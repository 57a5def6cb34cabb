import pytest

from loka_jax.terminal import clip, one_line, printable


@pytest.mark.parametrize(
    "text, escaped",
    [
        ("pläne/[b]x[/b] 表 :smile:", "pläne/[b]x[/b] 表 :smile:"),
        ("\x1b[2J\x1b]0;x\x07", r"\x1b[2J\x1b]0;x\x07"),
        ("a\r\nerror: b", r"a\r\nerror: b"),
        ("\x9b1A\x00", r"\x9b1A\x00"),
        ("\u202egpj.exe", r"\u202egpj.exe"),  # would be shown from right to left
        ("\udcff", r"\udcff"),  # a byte of a file name that is not UTF-8
    ],
)
def test_what_a_terminal_obeys_becomes_an_escape(text, escaped):
    assert printable(text) == escaped


def test_only_the_start_of_a_long_text_or_error_is_shown():
    assert clip("a\x1b" + 100 * "b") == r"a\x1b" + 38 * "b"
    error = OSError("no room:\n\n  disk \x1b[2J" + 300 * "x")
    assert one_line(error, 20) == r"OSError: no room: disk \x1b[2Jxx"
    assert one_line(KeyError(), 20) == "KeyError: "
