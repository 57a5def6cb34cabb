"""What commands end with."""


def assert_refused(result, *parts):
    """Asserts exit code 2 and one sentence on a line of its own.

    Args:
        result: exit code, standard output and error.
        parts: of the sentence.
    """
    code, _, err = result
    assert code == 2, err
    assert "Traceback" not in err
    for part in parts:
        assert part in err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert err.endswith((".\n", "?\n")), err
