"""Plants mistakes in a clone, one at a time, and prints which tests notice each.

    python -m tests.drills.mistakes [--parts optim train ...] [--only TEXT]

Tests are asked in turn, until one fails: those that a mistake names, the mirrored folder
of tests/unit, all of tests/unit (what plain `pytest` runs), the mirrored folder of
tests/whole. Only committed files are seen. Ends with code 1 if more than one mistake in
twenty is missed, or plain `pytest` notices less than four fifths.
"""

import argparse
import functools
import importlib
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.drills import mistakes
from tests.drills.mistakes import Mistake

ROOT = Path(__file__).parents[3]
PLAIN, WHOLE, MISSED = "plain", "whole", "MISSED"
FAILED = {1, 2}  # pytest's codes: a test failed; a module could not be imported
PASSED = {0, 5}  # 5: no test was found


def main():
    parts = [module.name for module in pkgutil.iter_modules(mistakes.__path__)]
    parts.remove("__main__")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--only", default="", help="text in a mistake's description")
    options = parser.parse_args()
    found = Counter()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        for part in options.parts:
            for mistake in importlib.import_module(
                f"{mistakes.__name__}.{part}"
            ).MISTAKES:
                if options.only not in mistake.what:
                    continue
                tier, where = notice(clone, mistake)
                found[tier] += 1
                print(f"{tier:6} {part}: {mistake.what} ({where})", flush=True)
    total = found.total()
    noticed = total - found[MISSED]
    print(f"{noticed} of {total} noticed, {found[PLAIN]} of them by plain pytest")
    sys.exit(noticed < 0.95 * total or found[PLAIN] < 0.8 * total)


def notice(clone: Path, mistake: Mistake) -> tuple[str, str]:
    """Returns the tier that notices the mistake, and its folder or file."""
    file = clone / mistake.path
    text = file.read_text()
    if text.count(mistake.before) != 1:
        raise ValueError(
            f"{mistake.path} has {text.count(mistake.before)} places that read "
            f"{mistake.before!r}; a mistake is planted in one"
        )
    for where in filter(lambda where: (clone / where).exists(), places(mistake)):
        require_passing(clone, where)
        file.write_text(text.replace(mistake.before, mistake.after))
        is_noticed = fails(clone, where)
        file.write_text(text)
        if is_noticed:
            return (PLAIN if where.startswith("tests/unit") else WHOLE), where
    return MISSED, "no test of these"


def places(mistake: Mistake) -> list[str]:
    """Returns folders and files of tests, those that notice soonest first."""
    folders = Path(mistake.path).parts[mistake.path.startswith("loka_jax/") : -1]
    room = "/".join(folders) or f"{Path(mistake.path).stem}_test.py"
    named = [f"tests/{name}" for name in mistake.tests.split()]
    return [*named, f"tests/unit/{room}", "tests/unit", f"tests/whole/{room}"]


@functools.cache
def require_passing(clone: Path, where: str):
    """Raises an error if tests fail where nothing is planted: they notice nothing."""
    if fails(clone, where):
        raise RuntimeError(f"{where} fails without any mistake")


def fails(clone: Path, where: str) -> bool:
    """Returns whether a test fails."""
    cache = f"cache_dir={clone.parent / 'cache'}"
    command = [sys.executable, "-m", "pytest", "-x", "-o", cache, where]
    done = subprocess.run(
        command,
        cwd=clone,
        env={**os.environ, "PYTHONPATH": str(clone)},
        capture_output=True,
        text=True,
    )
    if done.returncode not in FAILED | PASSED:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}")
    return done.returncode in FAILED


if __name__ == "__main__":
    main()
