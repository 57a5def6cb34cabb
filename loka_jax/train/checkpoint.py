"""Checkpoints that are verified before they are restored.

Orbax writes the arrays into `.unfinished`; the manifest follows; then one rename makes
the directory a checkpoint, whatever kills the process. A step that later differs from
its manifest is renamed, and the step before it is used.

    <directory>/<step>/default/...          Orbax's arrays (OCDBT)
    <directory>/<step>/manifest.json        digests, leaves, the caller's `meta`
    <directory>/<step>.damaged-<n>          renamed, never read again
    <directory>/.unfinished                 the save in progress; leftovers are removed

Arrays and JSON only, no pickle; nothing is read through a symlink. A foreign checkpoint
is still untrusted input: digests reveal damage, not intent.
Single process: every leaf must be addressable from it. One writer: the run's lock
(`record.RunRecord`) excludes a second one; others may read at any time.
"""

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from loka_jax import jsonfile
from loka_jax.train import manifest
from loka_jax.train.record import steps_in

_log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run: saved in the background, verified when restored.

    A save that fails is tried once more; if that fails too, the next call of `save`,
    `wait` or `close` raises. So once `close` has returned, everything is saved. Usable
    in a `with` statement, which closes.
    """

    def __init__(self, directory: str | os.PathLike, *, keep: int = 3):
        """Opens `directory`, creating it if necessary.

        Args:
            directory: the folder of the steps; it may be a symlink itself.
            keep: the number of newest checkpoints to keep.

        Raises:
            ValueError: if `keep` is not positive or the directory cannot be made.
        """
        if not keep >= 1:
            raise ValueError(f"{keep=} must be at least 1.")
        self._keep = keep
        self._directory = Path(directory).resolve()
        self._unfinished = self._directory / ".unfinished"
        self._manager: ocp.CheckpointManager | None = None
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        _quiet_orbax()
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
        leaves = {name: _to_host(name, leaf) for name, leaf in _named_leaves(state)}
        content = {
            "step": step,
            "leaves": {
                name: {"shape": list(array.shape), "dtype": dtype}
                for name, (array, dtype) in leaves.items()
            },
            "meta": jsonfile.jsonable(meta, nan_as_null=False),
        }
        arrays = {name: array for name, (array, _) in leaves.items()}
        self._require_space(sum(array.nbytes for array in arrays.values()))
        # Not a daemon, so that the interpreter waits for it before it exits.
        self._thread = threading.Thread(
            target=self._save_twice, args=(step, arrays, content), name="checkpoint"
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
                _remove(self._unfinished)

    def latest_step(self) -> int | None:
        """Returns the newest step, without verifying it, or None."""
        return max(self._steps(), default=None)

    def drop_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, for a run that resumes at `step`."""
        self.wait()
        for later in self._steps():
            if later > step:
                self._remove_step(later)

    def restore(
        self, template: Any, *, config: dict[str, Any] | None = None
    ) -> tuple[int, Any, dict[str, Any]]:
        """Returns step, state and meta of the newest undamaged checkpoint.

        Every digest is verified before an array is read. A damaged step is renamed to
        `<step>.damaged-<n>`, with one line of warning, and the step before it is
        taken. Leaves are bit for bit as saved, on the devices of the template's leaves.

        Args:
            template: a pytree of arrays or `jax.ShapeDtypeStruct` like the saved state.
            config: the current config, to explain a template that does not fit.

        Raises:
            ValueError: if there is no undamaged checkpoint, or the tree, a shape or a
                dtype of the newest differs from `template`. Nothing is cast.
        """
        self.wait()
        first_damage = None
        for step in sorted(self._steps(), reverse=True):
            path = self._path(step)
            try:
                content = manifest.verify(path)
                if content["step"] != step:
                    raise manifest.Damaged(f"{path}: was step {content['step']}")
            except manifest.Damaged as damage:
                first_damage = first_damage or damage
                self._put_aside(path, damage)
                continue
            _require_fit(content, template, config, path)
            return step, self._read(step, template), content["meta"]
        if first_damage:
            raise ValueError(
                f"no whole checkpoint is left in {self._directory} (the newest: "
                f"{first_damage}): restore one from a copy, or train from the start "
                "in another --workdir."
            )
        raise ValueError(
            f"there is no checkpoint in {self._directory}: check --workdir, or train "
            "without --resume."
        )

    def _path(self, step: int) -> Path:
        return self._directory / str(step)

    def _steps(self) -> list[int]:
        return steps_in(self._directory)

    def _require_space(self, state_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self._directory).free
        if free_bytes < 2 * state_bytes:
            raise ValueError(
                f"a checkpoint needs {2 * state_bytes / 1e9:.3f} GB free in "
                f"{self._directory} (twice the state), but only "
                f"{free_bytes / 1e9:.3f} GB are: free some space or choose another "
                "--workdir."
            )

    def _save_twice(
        self, step: int, arrays: dict[str, np.ndarray], content: dict[str, Any]
    ) -> None:
        """Saves in the background thread, trying twice; `wait` raises a failure."""
        for retries_left in (1, 0):
            try:
                self._write(step, arrays, content)
                self._remove_old()
                return
            except Exception as error:  # of any kind: `wait` raises it
                self._manager = None  # the next attempt starts in a clean directory
                reason = _first_line(error)
                if retries_left:
                    _log.warning("saving step %d failed (%s): retrying.", step, reason)
                    continue
                self._error = OSError(
                    f"step {step} could not be saved in {self._directory} ({reason}): "
                    "check space and permissions there; the newest checkpoint is "
                    f"step {self.latest_step()}."
                )

    def _write(
        self, step: int, arrays: dict[str, np.ndarray], content: dict[str, Any]
    ) -> None:
        if self._manager is None:
            _remove(self._unfinished)  # left by a killed run or a failed attempt
            self._unfinished.mkdir()
            self._manager = _manager(self._unfinished)
        # Orbax refuses arrays without elements, and a tree without arrays.
        stored = {name: a for name, a in arrays.items() if a.size}
        stored = stored or {"nothing": np.zeros(1, np.int8)}
        self._manager.save(step, args=ocp.args.PyTreeSave(stored), force=True)
        written = self._unfinished / str(step)
        manifest.write(written, content)
        os.replace(written, self._path(step))
        self._manager.reload()

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
        _log.warning("checkpoint damaged, renamed to %s: %s.", aside.name, damage)

    def _read(self, step: int, template: Any) -> Any:
        """Returns the arrays of a verified step as a tree like `template`."""
        named = dict(_named_leaves(template))
        names = [name for name, leaf in named.items() if leaf.size]
        as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
        args = ocp.args.PyTreeRestore(
            item=dict.fromkeys(names, 0), restore_args=dict.fromkeys(names, as_numpy)
        )
        arrays: dict[str, np.ndarray] = {}
        if names:
            with _manager(self._directory) as manager:
                arrays = manager.restore(step, args=args)
        leaves = [_from_host(arrays.get(name), leaf) for name, leaf in named.items()]
        return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _manager(directory: Path) -> ocp.CheckpointManager:
    # Synchronous, because our own thread is in the background and awaits the save.
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    return ocp.CheckpointManager(directory, options=options)


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves with their paths, such as "params/dense_0/kernel"."""
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
    for name, leaf in named:
        if not hasattr(leaf, "dtype"):
            raise ValueError(
                f"state leaf {name!r} is a {type(leaf).__name__}, not an array: wrap "
                "it in jnp.asarray, or put it into meta."
            )
    # {"a": {"b": x}, "a/b": y} would share a name; only a programming error does that.
    assert len({name for name, _ in named}) == len(named), "two leaves share a path"
    return named


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_host(name: str, leaf: Any) -> tuple[np.ndarray, str]:
    """Returns a copy of a leaf in host memory, and the name of its dtype.

    A typed PRNG key becomes its words; the dtype's name records the generator.
    """
    dtype = str(leaf.dtype)
    data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    # A copy, as the array may be donated and its memory reused while Orbax writes.
    return np.array(data, copy=True), dtype


def _from_host(array: np.ndarray | None, template: Any) -> Any:
    """Returns a restored leaf of the template's type, on the template's devices."""
    if array is None:  # arrays without elements are not written
        array = np.zeros(template.shape, template.dtype)
    if isinstance(template, np.ndarray | np.generic):
        return array
    leaf = jnp.asarray(array)
    if _is_key(template):
        impls = []
        jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), template)
        leaf = jax.random.wrap_key_data(leaf, impl=impls[0])
    # An uncommitted array stays so: a committed copy would cause a recompilation.
    is_uncommitted = template.sharding is None or not getattr(
        template, "committed", True
    )
    return leaf if is_uncommitted else jax.device_put(leaf, template.sharding)


def _describe(leaf: Any) -> dict[str, Any]:
    """Returns shape and dtype as in the manifest; for a key, the shape of its words."""
    words = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return {"shape": list(words.shape), "dtype": str(leaf.dtype)}


def _require_fit(
    content: dict[str, Any], template: Any, config: dict[str, Any] | None, path: Path
) -> None:
    """Raises ValueError at the first leaf in which checkpoint and template differ."""
    saved = content["leaves"]
    expected = {name: _describe(leaf) for name, leaf in _named_leaves(template)}
    names = [n for n in {**expected, **saved} if saved.get(n) != expected.get(n)]
    if not names:
        return

    def text(leaf: dict[str, Any] | None) -> str:
        return "absent" if leaf is None else f"{leaf['dtype']}{leaf['shape']}"

    name = names[0]
    more = f" (and {len(names) - 1} more leaves differ)" if names[1:] else ""
    changed = []
    if config is not None:
        saved_config = content["meta"].get("config", {})
        changed = jsonfile.explain_mismatch(saved_config, config)
    reason = f"; the configs differ in {', '.join(changed[:5])}" if changed else ""
    raise ValueError(
        f"{path} does not fit this model: {name!r} is {text(saved.get(name))} there "
        f"and {text(expected.get(name))} here{more}: resume with the config it was "
        f"saved with, or use another --workdir{reason}."
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0][:200]}"


def _remove(path: Path) -> None:
    """Removes a directory and its contents, or a symlink to one."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _quiet_orbax() -> None:
    """Keeps Orbax's progress messages off the console, but not warnings and errors."""
    for name in ("absl", "orbax"):
        logger = logging.getLogger(name)
        if logger.getEffectiveLevel() < logging.WARNING:
            logger.setLevel(logging.WARNING)
