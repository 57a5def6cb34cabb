"""Checkpoints that are verified before they are restored.

Orbax writes the arrays into `.unfinished`, where they are opened again; the manifest
follows; then one rename makes the directory a checkpoint, whatever kills the process. A
step that later differs from its manifest is renamed, and the step before it is used.

    <directory>/<step>/default/...          Orbax's arrays (OCDBT)
    <directory>/<step>/manifest.json        digests, leaves, the caller's `meta`
    <directory>/<step>.damaged-<n>          renamed, never read again
    <directory>/.unfinished                 the save in progress; leftovers are removed

Arrays and JSON only, no pickle; nothing is read through a symlink. A foreign checkpoint
is still untrusted input: digests reveal damage, not intent.
One writer: the run's lock (`record.RunRecord`) excludes a second one; others may read
at any time. Of several processes, all call the same in the same order, each writes its
own shards, and the first alone makes, commits, renames and removes.
"""

import contextlib
import functools
import glob
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import jax

from loka_jax import jsonfile
from loka_jax.saved_format import steps_in
from loka_jax.terminal import one_line, printable
from loka_jax.train.checkpoints import manifest, orbax_files
from loka_jax.train.checkpoints.leaves import (
    described,
    from_host,
    named_leaves,
    require_fit,
    to_host,
)
from loka_jax.train.checkpoints.manifest import Saved
from loka_jax.train.processes.group import ALONE, Processes

# Bytes on the disk for a byte of state that does not compress, with something to spare.
_DISK_BYTES = 1.1

_log = logging.getLogger(__name__)


class Checkpoints(contextlib.AbstractContextManager):
    """The checkpoints of one run: saved in the background, verified when restored.

    A save that fails is tried once more, if the process is alone; if that fails too,
    the next call of `save`, `wait` or `close` raises. So once `close` has returned,
    everything is saved. Usable in a `with` statement, which closes.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep: int = 3,
        processes: Processes = ALONE,
    ):
        """Opens `directory`, creating it if necessary; it may be a symlink itself.

        Args:
            keep: the number of newest checkpoints to keep.

        Raises:
            ValueError: if the directory cannot be made, or its path holds a wildcard,
                under which Orbax finds nothing again.
        """
        self._keep, self._processes = keep, processes
        self._directory = Path(directory).resolve()
        self._unfinished = self._directory / ".unfinished"
        # Its thread is no daemon: the interpreter waits for it before it exits.
        self._background = futures.ThreadPoolExecutor(1, "checkpoint")
        self._saving: futures.Future | None = None
        orbax_files.quiet()
        if glob.escape(str(self._directory)) != str(self._directory):
            raise ValueError(
                f"no checkpoint can be saved below {self._directory}, because its path "
                "holds one of the wildcards * ? [: choose another --workdir."
            )
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"cannot create the checkpoint directory {self._directory} "
                f"({error.strerror}): choose another --workdir."
            ) from None

    def __exit__(self, *_: object) -> None:
        """Closes the checkpoints."""
        self.close()

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Starts saving `state` as `step`, after any earlier save, unless it is saved.

        The arrays are copied to the host before this returns, so their device buffers
        may be donated immediately. The newest `keep` checkpoints are kept.

        Args:
            meta: finite JSON values, which `newest` returns.

        Raises:
            ValueError: if a leaf is not an array, `meta` is not JSON, or the disk is
                too full.
            OSError: if the previous save failed twice.
        """
        self.wait()
        if step in self._steps():
            return
        arrays = {name: to_host(leaf) for name, leaf in named_leaves(state).items()}
        meta = jsonfile.as_dict(jsonfile.jsonable(meta, nan_as_null=False))
        size = sum(array.nbytes for array in arrays.values())
        _require_copies(self._directory, 1, size)
        write = functools.partial(self._write, step, arrays)
        if self._processes.count > 1:
            write = self._begin_shared(step, arrays)
        saved = Saved(step, meta, described(state))
        shapes = {name: array.shape for name, array in arrays.items() if array.size}
        self._saving = self._background.submit(self._finish, saved, shapes, write)

    def wait(self) -> None:
        """Waits until no save is in progress.

        Raises:
            OSError: if the last save failed twice.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def close(self) -> None:
        """Waits like `wait`, with the same errors."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            self.remove_unfinished()

    def remove_unfinished(self) -> None:
        """Removes what an interrupted save left; only the owner of the run may."""
        if self._processes.is_first:
            _remove(self._unfinished)

    def latest_step(self) -> int | None:
        """Returns the newest step, without verifying it, or None."""
        return max(self._steps(), default=None)

    def drop_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, for a run that resumes at `step`."""
        self.wait()
        for later in self._steps() if self._processes.is_first else ():
            if later > step:
                self._remove_step(later)
        orbax_files.meet(self._processes, "dropped")

    def newest(self) -> Saved | None:
        """Returns the newest undamaged checkpoint, or None if nothing was ever saved.

        Every digest is verified. A damaged step is renamed to `<step>.damaged-<n>`,
        with one line of warning, and the step before it is taken.

        Raises:
            ValueError: if only damaged checkpoints are left.
        """
        self.wait()
        newest = self._newest() if self._processes.is_first else None
        step = self._processes.same("" if newest is None else str(newest.step))
        if self._processes.is_first or not step:
            return newest
        # The first has checked its files.
        return manifest.read(self._path(int(step))).content

    def _newest(self) -> Saved | None:
        for step in sorted(self._steps(), reverse=True):
            path = self._path(step)
            try:
                saved = manifest.verify(path)
                if saved.step != step:
                    raise manifest.Damaged(f"{path}: was step {saved.step}")
                return saved
            except manifest.Damaged as damage:
                if not path.exists():  # its run has saved a newer one meanwhile
                    return self._newest()
                _put_aside(path, damage)
        if damaged := sorted(self._directory.glob("*.damaged-*")):
            names = ", ".join(path.name for path in damaged[-3:])
            raise ValueError(
                f"no whole checkpoint is left in {self._directory}, only {names}: "
                "restore one from a copy, or train from the start in another --workdir."
            )
        return None

    def read(self, saved: Saved, template: Any) -> Any:
        """Returns the state of a verified checkpoint.

        Leaves are bit for bit as saved, on the devices of the template's leaves.

        Args:
            template: a pytree of arrays or `jax.ShapeDtypeStruct` like the saved state.

        Raises:
            ValueError: if the tree, a shape or a dtype differs from `template`. Nothing
                is cast.
        """
        path, named = self._path(saved.step), named_leaves(template)
        require_fit(saved.leaves, template, path)
        stored = {name: leaf for name, leaf in named.items() if leaf.size}
        arrays = orbax_files.read(path, stored)
        leaves = [from_host(arrays.get(name), leaf) for name, leaf in named.items()]
        return jax.tree.unflatten(jax.tree.structure(template), leaves)

    def _path(self, step: int) -> Path:
        return self._directory / str(step)

    def _steps(self) -> list[int]:
        return steps_in(self._directory)

    def _write(self, step: int, arrays: dict[str, Any]) -> None:
        self._empty_unfinished()
        orbax_files.write(self._unfinished / str(step), arrays)

    def _begin_shared(self, step: int, arrays: dict[str, Any]) -> Callable[[], None]:
        """Copies the arrays of all processes; returns what waits for their files."""
        if self._processes.is_first:
            self._empty_unfinished()
        orbax_files.meet(self._processes, "begin")
        path = self._unfinished / str(step)
        writer = orbax_files.begin(path, arrays, self._processes)

        def wait() -> None:
            writer.wait_until_finished()
            writer.close()

        return wait

    def _empty_unfinished(self) -> None:
        """Removes what a killed run or a failed attempt left."""
        _remove(self._unfinished)
        self._unfinished.mkdir()

    def _finish(
        self, saved: Saved, shapes: dict[str, Any], write: Callable[[], None]
    ) -> None:
        """Ends a save in the background; `write` returns once arrays are written."""
        is_alone = self._processes.count == 1
        for retries_left in (1, 0) if is_alone else (0,):
            try:
                write()
                if self._processes.is_first:
                    self._commit(saved, shapes)
                    self._remove_old()
                orbax_files.meet(self._processes, "saved")
                return
            except Exception as error:  # of Orbax, or of any file system
                reason = one_line(error)
                if not retries_left:
                    raise OSError(
                        f"step {saved.step} could not be saved in {self._directory} "
                        f"({reason}): check space and permissions there; the newest "
                        f"checkpoint is step {self.latest_step()}."
                    ) from None
                _log.warning(
                    "saving step %d failed (%s): retrying.", saved.step, reason
                )

    def _commit(self, saved: Saved, shapes: dict[str, Any]) -> None:
        """Makes what was written a checkpoint, if Orbax finds every array again."""
        written = self._unfinished / str(saved.step)
        if shapes and orbax_files.shapes(written) != shapes:
            raise OSError("what was written holds other arrays than the state")
        manifest.write(written, saved)
        os.replace(written, self._path(saved.step))
        jsonfile.sync_directory(self._directory)

    def _remove_old(self) -> None:
        """Removes all but the newest `keep` checkpoints."""
        for step in sorted(self._steps())[: -self._keep]:
            try:
                self._remove_step(step)
            except OSError as error:
                _log.warning("could not remove old checkpoint %d (%s).", step, error)

    def _remove_step(self, step: int) -> None:
        """Removes a checkpoint atomically: a kill leaves it complete or removed."""
        removed = self._unfinished / f"removed-{step}"
        self._unfinished.mkdir(exist_ok=True)
        os.replace(self._path(step), removed)
        _remove(removed)


def _put_aside(path: Path, damage: manifest.Damaged) -> None:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
        number += 1
    os.replace(path, aside)
    text = printable(str(damage))
    _log.warning("checkpoint damaged, renamed to %s: %s.", aside.name, text)


def require_space(folders: Sequence[Checkpoints], state: Any) -> None:
    """Checks, before the first step, that the checkpoints of a run will fit.

    Raises:
        ValueError: if a file system has less space than the checkpoints of a state that
            are kept, and those in progress, need beside the ones that are there.
            Folders on one file system share its space.
    """
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    copies: dict[int, int] = {}  # to come, by file system
    places: dict[int, Path] = {}
    for folder in folders:
        device = folder._directory.stat().st_dev
        # The oldest checkpoint is removed after the newest has been saved.
        to_come = max(folder._keep - len(folder._steps()), 0) + 1
        copies[device] = copies.get(device, 0) + to_come
        places.setdefault(device, folder._directory)
    for device, count in copies.items():
        _require_copies(places[device], count, size)


def _require_copies(directory: Path, copies: int, state_bytes: int) -> None:
    """Raises ValueError if a file system has no space for so many more checkpoints."""
    needed = int(_DISK_BYTES * copies * state_bytes)
    free = shutil.disk_usage(directory).free
    if free < needed:
        folders = (directory, *directory.parents)
        mount = next(folder for folder in folders if folder.is_mount())
        more = "checkpoint" if copies == 1 else "checkpoints"
        raise ValueError(
            f"{directory} needs {needed:,} bytes for {copies} more {more}, and "
            f"{free:,} are free on its file system ({mount}): free "
            f"{needed - free:,} bytes there, lower --loop.keep-checkpoints, or choose "
            "another --workdir."
        )


def _remove(path: Path) -> None:
    """Removes a directory and its contents, or a symlink to one."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
