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
own shards, and the first alone makes, commits, renames and removes (`shared_save`).
"""

import glob
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from loka_jax import jsonfile
from loka_jax.saved_format import steps_in
from loka_jax.terminal import one_line, printable
from loka_jax.train.checkpoints import disk_room, manifest, orbax_manager, shared_save
from loka_jax.train.checkpoints.leaves import (
    from_host,
    named_leaves,
    require_fit,
    shared,
    to_host,
)
from loka_jax.train.checkpoints.manifest import Saved
from loka_jax.train.processes.group import ALONE, Processes

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run: saved in the background, verified when restored.

    A save that fails is tried once more; if that fails too, the next call of `save`,
    `wait` or `close` raises. So once `close` has returned, everything is saved. Usable
    in a `with` statement, which closes.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep: int = 3,
        processes: Processes = ALONE,
    ):
        """Opens `directory`, creating it if necessary.

        Args:
            directory: the folder of the steps; it may be a symlink itself.
            keep: the number of newest checkpoints to keep.
            processes: of the run.

        Raises:
            ValueError: if `keep` is not positive, the directory cannot be made, or
                its path holds a wildcard, under which Orbax finds nothing again.
        """
        if not keep >= 1:
            raise ValueError(f"{keep=} must be at least 1.")
        self._keep, self._processes = keep, processes
        self._directory = Path(directory).resolve()
        self._unfinished = self._directory / ".unfinished"
        self._manager: ocp.CheckpointManager | None = None
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        orbax_manager.quiet_orbax()
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

    def __enter__(self) -> "Checkpoints":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the checkpoints."""
        self.close()

    @property
    def directory(self) -> Path:
        """The folder of the steps."""
        return self._directory

    def copies_to_come(self) -> int:
        """Returns how many checkpoints there will be at most beside those there are."""
        # The oldest checkpoint is removed after the newest has been saved.
        return max(self._keep - len(self._steps()), 0) + 1

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> bool:
        """Starts saving `state` as `step`, after any earlier save has ended.

        The arrays are copied to the host before this returns, so their device buffers
        may be donated immediately. The newest `keep` checkpoints are kept.

        Args:
            step: the number of steps `state` has seen.
            state: a pytree of arrays, including FP8 arrays and typed PRNG keys.
            meta: finite JSON values, which `restore` returns with the state;
                `meta["config"]` helps to explain a mismatch.

        Returns:
            False if `step` was saved already and nothing was done.

        Raises:
            ValueError: if a leaf is not an array, `meta` is not JSON, or the disk is
                too full.
            OSError: if the previous save failed twice.
        """
        self.wait()
        if step in self._steps():
            return False
        copied = to_host if self._processes.count == 1 else shared
        leaves = {name: copied(name, leaf) for name, leaf in named_leaves(state)}
        shapes = {
            name: {"shape": list(array.shape), "dtype": dtype}
            for name, (array, dtype) in leaves.items()
        }
        meta = jsonfile.as_dict(jsonfile.jsonable(meta, nan_as_null=False))
        saved = Saved(step, meta, shapes)
        arrays = {name: array for name, (array, _) in leaves.items()}
        size = sum(array.nbytes for array in arrays.values())
        disk_room.require_copies(self._directory, 1, size)
        save = self._save_twice
        if self._processes.count > 1:
            save = self._begin_shared(step, arrays)
        # Not a daemon, so that the interpreter waits for it before it exits.
        self._thread = threading.Thread(
            target=save, args=(saved, arrays), name="checkpoint"
        )
        self._thread.start()
        return True

    def wait(self) -> None:
        """Waits until no save is in progress.

        Raises:
            OSError: if the last save failed twice.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits like `wait`, with the same errors, and frees Orbax's resources."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
                self._manager = None
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
        shared_save.meet(self._processes, "dropped")

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
        return manifest.verified_by_another(self._path(int(step)))  # the first

    def _newest(self) -> Saved | None:
        for step in sorted(self._steps(), reverse=True):
            path = self._path(step)
            try:
                return manifest.verified(path, step)
            except manifest.Damaged as damage:
                if not path.exists():  # its run has saved a newer one meanwhile
                    return self._newest()
                self._put_aside(path, damage)
        if damaged := sorted(self._directory.glob("*.damaged-*")):
            names = ", ".join(path.name for path in damaged[-3:])
            raise ValueError(
                f"no whole checkpoint is left in {self._directory}, only {names}: "
                "restore one from a copy, or train from the start in another --workdir."
            )
        return None

    def read(
        self, saved: Saved, template: Any, *, config: dict[str, Any] | None = None
    ) -> Any:
        """Returns the state of a verified checkpoint.

        Leaves are bit for bit as saved, on the devices of the template's leaves.

        Args:
            saved: from `newest`.
            template: a pytree of arrays or `jax.ShapeDtypeStruct` like the saved state.
            config: the current config, to explain a template that does not fit.

        Raises:
            ValueError: if the tree, a shape or a dtype differs from `template`. Nothing
                is cast.
        """
        changed = []
        if config is not None:
            changed = jsonfile.explain_mismatch(saved.meta.get("config", {}), config)
        require_fit(saved.leaves, template, self._path(saved.step), changed)
        named = dict(named_leaves(template))
        arrays = self._read_arrays(
            saved.step, {name: leaf for name, leaf in named.items() if leaf.size}
        )
        leaves = [from_host(arrays.get(name), leaf) for name, leaf in named.items()]
        return jax.tree.unflatten(jax.tree.structure(template), leaves)

    def restore(
        self, template: Any, *, config: dict[str, Any] | None = None
    ) -> tuple[int, Any, dict[str, Any]]:
        """Returns step, state and meta of the newest undamaged checkpoint.

        Arguments and errors are those of `newest` and `read`.

        Raises:
            ValueError: also if there is no checkpoint.
        """
        saved = self.newest()
        if saved is None:
            raise ValueError(
                f"there is no checkpoint in {self._directory}: check --workdir, or "
                "train without --resume."
            )
        return saved.step, self.read(saved, template, config=config), saved.meta

    def _path(self, step: int) -> Path:
        return self._directory / str(step)

    def _steps(self) -> list[int]:
        return steps_in(self._directory)

    def _save_twice(self, saved: Saved, arrays: dict[str, np.ndarray]) -> None:
        """Saves in the background thread, trying twice; `wait` raises a failure."""
        name = f"step {saved.step}"
        for retries_left in (1, 0):
            try:
                self._write(saved, arrays)
                self._remove_old()
                return
            except Exception as error:  # of any kind: `wait` raises it
                self._manager = None  # the next attempt starts in a clean directory
                if retries_left:
                    reason = one_line(error)
                    _log.warning("saving %s failed (%s): retrying.", name, reason)
                    continue
                self._error = self._failure(saved, error)

    def _failure(self, saved: Saved, error: Exception) -> OSError:
        return OSError(
            f"step {saved.step} could not be saved in {self._directory} "
            f"({one_line(error)}): check space and permissions there; the newest "
            f"checkpoint is step {self.latest_step()}."
        )

    def _begin_shared(
        self, step: int, arrays: dict[str, Any]
    ) -> Callable[[Saved, dict[str, Any]], None]:
        """Copies the arrays of all processes; returns what ends the save."""
        if self._processes.is_first:
            _remove(self._unfinished)
            self._unfinished.mkdir()
        shared_save.meet(self._processes, "begin")
        stored = {name: a for name, a in arrays.items() if a.size}
        writer = shared_save.begin(
            self._unfinished / str(step), stored, self._processes
        )

        def end(saved: Saved, _: dict[str, Any]) -> None:
            try:
                writer.wait_until_finished()
                writer.close()
                if self._processes.is_first:
                    self._commit(saved)
                    self._remove_old()
                shared_save.meet(self._processes, "saved")
            except Exception as error:  # of any kind: `wait` raises it
                self._error = self._failure(saved, error)

        return end

    def _write(self, saved: Saved, arrays: dict[str, np.ndarray]) -> None:
        if self._manager is None:
            _remove(self._unfinished)  # left by a killed run or a failed attempt
            self._unfinished.mkdir()
            self._manager = orbax_manager.manager_of(self._unfinished)
        # Orbax refuses arrays without elements, and a tree without arrays.
        stored = {name: a for name, a in arrays.items() if a.size}
        stored = stored or {"nothing": np.zeros(1, np.int8)}
        self._manager.save(saved.step, args=ocp.args.PyTreeSave(stored), force=True)
        self._open_again(saved.step, stored)
        self._commit(saved)
        self._manager.reload()

    def _commit(self, saved: Saved) -> None:
        written = self._unfinished / str(saved.step)
        manifest.write(written, saved._asdict())
        os.replace(written, self._path(saved.step))
        jsonfile.sync_directory(self._directory)

    def _open_again(self, step: int, stored: dict[str, np.ndarray]) -> None:
        """Raises OSError unless Orbax finds every array of the save in progress."""
        assert self._manager is not None
        tree = self._manager.item_metadata(step).tree
        shapes = {name: tuple(array.shape) for name, array in tree.items()}
        if shapes != {name: array.shape for name, array in stored.items()}:
            raise OSError("what was written holds other arrays than the state")

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

    def _put_aside(self, path: Path, damage: manifest.Damaged) -> None:
        number = 1
        while os.path.lexists(aside := path.with_name(f"{path.name}.damaged-{number}")):
            number += 1
        os.replace(path, aside)
        text = printable(str(damage))
        _log.warning("checkpoint damaged, renamed to %s: %s.", aside.name, text)

    def _read_arrays(self, step: int, leaves: dict[str, Any]) -> dict[str, Any]:
        if not leaves:
            return {}
        how = {name: shared_save.restore_args(leaf) for name, leaf in leaves.items()}
        args = ocp.args.PyTreeRestore(
            item=dict.fromkeys(leaves, 0),
            restore_args=how,
            partial_restore=True,  # `require_fit` has compared the names
        )
        with orbax_manager.manager_of(self._directory) as manager:
            return manager.restore(step, args=args)


def _remove(path: Path) -> None:
    """Removes a directory and its contents, or a symlink to one."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
