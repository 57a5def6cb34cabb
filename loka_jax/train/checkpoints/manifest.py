"""Manifests of checkpoints, which reveal damage.

`manifest.json` holds the SHA-256 of every file in the directory, what is saved there,
and a digest of itself. It is checked before any other file is opened. It reveals
damage, not intent: anyone who can write the files can write a manifest too. SHA-256
runs at 1.7 GB/s a core, faster than most disks.
"""

import dataclasses
import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from loka_jax import jsonfile, saved_format

NAME = "manifest.json"


class Damaged(Exception):
    """A directory differs from its manifest; the text names the file and the reason."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """What the manifest of a checkpoint says about it.

    Attributes:
        leaves: dtype and shape of every leaf, by name.
    """

    step: int
    meta: dict[str, Any]
    leaves: dict[str, str]

    def only(self, parts: Collection[str]) -> "Saved":
        """Returns the checkpoint as if it held these parts of the state only."""
        kept = {k: v for k, v in self.leaves.items() if k.split("/", 1)[0] in parts}
        return dataclasses.replace(self, leaves=kept)

    def has(self, part: str) -> bool:
        """Returns whether there are leaves of a part of the state."""
        return bool(self.only([part]).leaves)


@dataclasses.dataclass
class _Manifest:
    format: int
    files: dict[str, str]
    content: Saved


def write(path: Path, saved: Saved) -> None:
    """Writes a manifest of the files in `path` in one step."""
    files = {name: _sha256(path / name) for name in sorted(_files(path))}
    manifest = dataclasses.asdict(_Manifest(saved_format.RUN, files, saved))
    jsonfile.write(path / NAME, {"manifest": manifest, "sha256": _digest(manifest)})


def verify(path: Path) -> Saved:
    """Returns what is saved in `path` after checking every file there.

    Raises:
        Damaged: at the first file that is missing, changed, not listed, or a symlink.
        ValueError: if another version wrote the manifest, or a file cannot be read.
    """
    try:
        present = _files(path)
        manifest = read(path)
        # If the sets are equal, no listed path points outside the directory.
        if missing := sorted(manifest.files.keys() - present):
            raise Damaged(f"{path / missing[0]}: missing")
        if added := sorted(present - manifest.files.keys()):
            raise Damaged(f"{path / added[0]}: was not there when it was written")
        for name, digest in manifest.files.items():
            if _sha256(path / name) != digest:
                raise Damaged(f"{path / name}: differs from what was written")
    except FileNotFoundError as error:  # it was there above
        raise Damaged(f"{error.filename}: was removed while it was read") from None
    except OSError as error:
        raise ValueError(
            f"cannot read {error.filename} ({error.strerror}): check its permissions."
        ) from None
    return manifest.content


def _files(path: Path) -> set[str]:
    """Returns the relative names of the files under `path`, except the manifest."""
    names = set()
    _require_no_link(path)
    for folder, folders, files in os.walk(path):  # does not enter symlinks
        for child in (Path(folder) / name for name in (*folders, *files)):
            _require_no_link(child)
            if child.is_file():
                names.add(child.relative_to(path).as_posix())
            elif not child.is_dir():  # opening a pipe would wait forever
                raise Damaged(f"{child}: is not a regular file")
    return names - {NAME}


def _require_no_link(path: Path) -> None:
    if path.is_symlink():
        raise Damaged(f"{path}: is a symlink")


def read(path: Path) -> _Manifest:
    """Returns the manifest in `path`, whose files it does not check."""
    file = path / NAME
    _require_no_link(file)
    if not file.is_file():
        raise Damaged(f"{file}: missing")
    try:
        outer = jsonfile.as_dict(jsonfile.read(file))
    except ValueError:
        raise Damaged(f"{file}: is not JSON") from None
    manifest = jsonfile.as_dict(outer.get("manifest"))
    if outer.get("sha256") != _digest(manifest):
        raise Damaged(f"{file}: differs from what was written")
    saved_format.require_run(path, manifest.get(saved_format.KEY))
    try:
        return jsonfile.typed(manifest, _Manifest)
    except ValueError as error:
        raise Damaged(f"{file}: {error}") from None


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(jsonfile.dumps(manifest).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
