"""The digest of the sources that decide speed: code counts, prose does not."""

import pathlib
import shutil

import pytest

import loka_jax
from loka_jax.dispatch import sources

PACKAGE = pathlib.Path(loka_jax.__file__).parent


@pytest.fixture
def package(tmp_path):
    """Returns the folder of a copy of the package."""
    path = tmp_path / "loka_jax"
    shutil.copytree(PACKAGE, path, ignore=shutil.ignore_patterns("__pycache__"))
    return path


def test_a_copy_has_the_same_digest(package):
    assert sources.digest(package) == sources.digest() != ""


def test_prose_does_not_count(package):
    path = package / "serving.py"
    text = path.read_text()
    code = text.split('"""', 2)[2]
    path.write_text(f"'Another docstring.'\n# A comment.\n{code}")
    (package / "pallas" / "tuned_h200.json").write_text(
        (package / "pallas" / "tuned_h200.json").read_text().replace("\n", "")
    )
    assert sources.digest(package) == sources.digest()


@pytest.mark.parametrize("name", ["serving.py", "fp8.py", "ops/roles.py", "xla/new.py"])
def test_code_counts(package, name):
    with open(package / name, "a") as file:
        file.write("\nanother = 1\n")
    assert sources.digest(package) != sources.digest()


def test_tuned_settings_count(package):
    path = package / "pallas" / "tuned_h200.json"
    text = path.read_text()
    digit = next(c for c in text if c in "123456789")
    path.write_text(text.replace(digit, "7" if digit != "7" else "8", 1))
    assert sources.digest(package) != sources.digest()


def test_what_is_not_installed_has_no_version():
    assert sources.version("jax") and sources.version("no-such-package") == ""
