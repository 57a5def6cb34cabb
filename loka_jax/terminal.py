"""Text of others on a terminal."""


def printable(text: str) -> str:
    r"""Returns a text in which control characters are escapes, such as \x1b.

    A terminal obeys some of them: file names, tables and error messages of compilers
    could clear the screen or forge a line. A line break becomes an escape too.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )
