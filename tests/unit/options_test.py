"""Options in messages: names, requirements, what is near, entries of pairs."""

import pytest

from loka_jax.options import did_you_mean, option_of, pairs, require


def test_messages_name_the_option_its_value_and_what_is_near():
    fields = "loop.batch_size", "model.top_mlp", "run.workdir", "name", "model.kind"
    options = "--loop.batch-size", "--top-mlp", "--workdir", "--config", "--config"
    assert tuple(map(option_of, fields)) == options
    with pytest.raises(ValueError, match=r"^--seed 3 must be even\.$"):
        require(False, "--seed", 3, "even")
    names = ("lr", "rows_lr", "momentum")
    assert did_you_mean("momentun", names) == " (did you mean 'momentum'?)"
    assert did_you_mean("decay", names) == ""
    assert did_you_mean("rows", names) == " (did you mean 'rows_lr'?)"
    assert did_you_mean("rows", names, cutoff=0.8) == ""


def test_entries_name_columns_that_may_hold_the_sign_of_equality():
    found = pairs("--x", ("a=b=1", "a=2", "c=a="), ("a", "a=b", "c"))
    assert found == {"a=b": "1", "a": "2", "c": "a="}


@pytest.mark.parametrize(
    ("values", "names", "why"),
    [
        (("a",), ("a", "b"), "--x 'a' must be COLUMN=VALUE; the columns are a, b."),
        (("a=",), ("a",), "must be COLUMN=VALUE"),
        (("c=1",), (), "the columns are none."),
        (("a=1", "a=2"), ("a",), "--x names 'a' twice: leave one of them out."),
    ],
)
def test_entries_of_another_form_are_refused(values, names, why):
    with pytest.raises(ValueError, match=why):
        pairs("--x", values, names)
