"""`--help` before JAX is imported, and the help on all options that is kept."""

import re

import pytest

from experiments import configs, first_help, train
from loka_jax.recipe import RECIPES


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_help_without_a_configuration_lists_them_and_ten_options(run):
    code, out, err = run(train, "--help")
    assert (code, err) == (0, "")
    large = [x for x in configs.names() if not re.match("bf16_.*|.*_tiny$", x)]
    assert all(f"\n  {name} " in out for name in large)
    assert len(out.splitlines()) <= 48
    assert all(f" {name}" in out for name in RECIPES)


def test_all_of_the_help_has_own_defaults_and_is_kept(run, monkeypatch, capsys):
    code, out, _ = run(train, "--config", "frappe_dlrm", "--help")
    assert code == 0 and "train.py --config frappe_dlrm" in out
    assert "(default: 100)" in " ".join(out.split())  # its epochs
    short = first_help.short_help("tune.py") + first_help.short_help("probe.py")
    option = r"--[a-z][a-z.-]*[a-z]"
    missing = set(re.findall(option, short)) - set(re.findall(option, out))
    assert missing == {"--option", "--table", "--tune", "--survey"}
    with pytest.raises(SystemExit):
        first_help.first_help(["--config", "frappe_dlrm", "-h"], "train.py")
    short = first_help.short_help("train.py")
    assert capsys.readouterr().out == f"{short}\n{out}"
    monkeypatch.setenv("COLUMNS", "77")
    assert first_help.kept_help("train.py", "frappe_dlrm") is None
    first_help.keep_help("train.py", "mine.py:f", "of a user's file")
    assert first_help.kept_help("train.py", "mine.py:f") is None
