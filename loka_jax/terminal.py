"""Text of others (names in files, messages of compilers), and words of all commands."""

# What pages and commands call a kind of values, where its own name is no word.
KIND_WORDS = {"oov": "not in the vocabulary"}


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


def clip(text: object, limit: int = 40) -> str:
    """Returns the start of a text of others, fit for a line of a message."""
    return printable(str(text)[:limit])


def one_line(error: BaseException, limit: int = 200) -> str:
    """Returns the type of an error and the start of its text, on one line."""
    return f"{type(error).__name__}: {clip(' '.join(str(error).split()), limit)}"
