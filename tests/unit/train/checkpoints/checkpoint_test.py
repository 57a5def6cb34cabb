import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from loka_jax import jsonfile
from loka_jax.train.checkpoints import manifest
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.checkpoints.disk_room import require_space


class State(NamedTuple):
    params: dict
    optimizer: optax.OptState
    fp8: dict
    key: jax.Array
    step: jax.Array


def make_state(seed):
    """Returns a state with every kind of leaf a run holds."""
    key = jax.random.key(seed)
    x = jax.random.normal(key, (8, 16), jnp.float32)
    params = {"dense_0": {"kernel": x, "bias": x[0].astype(jnp.bfloat16)}}
    return State(
        params=params,
        optimizer=optax.adam(1e-3).init(params),
        fp8={
            "lhs": x.astype(jnp.float8_e4m3fn),
            "g": x.astype(jnp.float8_e5m2),
            "specials": jnp.float32([np.nan, np.inf, -0.0, 1e-42]),
            "none": jnp.zeros((0, 4)),
        },
        key=key,
        step=jnp.int32(seed),
    )


def bits(leaf):
    """Returns the bytes of a leaf, so that NaN and -0.0 compare as they are."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def assert_same_bits(got, want):
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert bits(a) == bits(b)


def fill(directory, *steps):
    with Checkpoints(directory) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {"config": {"lr": 0.1}})


def restore(directory, template=None, **kwargs):
    template = make_state(0) if template is None else template
    with Checkpoints(directory) as checkpoints:
        return checkpoints.restore(template, **kwargs)


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two checkpoints, steps 1 and 2; copy before harming."""
    directory = tmp_path_factory.mktemp("saved")
    fill(directory, 1, 2)
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def test_every_leaf_comes_back_bit_for_bit(saved):
    step, state, meta = restore(saved)
    assert (step, meta) == (2, {"config": {"lr": 0.1}})
    assert_same_bits(state, make_state(2))


def test_raw_key_and_numpy_leaves_come_back(tmp_path):
    state = {"key": jax.random.key_data(jax.random.key(1)), "rows": np.arange(3)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        _, got, _ = checkpoints.restore(state)
    assert isinstance(got["rows"], np.ndarray) and isinstance(got["key"], jax.Array)
    assert_same_bits(got, state)


def test_shapes_alone_serve_as_template(saved):
    template = jax.eval_shape(make_state, 0)
    _, state, _ = restore(saved, template)
    assert_same_bits(state, make_state(2))


def test_a_state_without_elements_is_saved(tmp_path):
    state = {"a": jnp.zeros((0, 3)), "b": ()}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        assert checkpoints.restore(state)[1]["a"].shape == (0, 3)


def test_leaves_lie_where_the_template_lies(tmp_path):
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("shard"))
    state = {"table": jax.device_put(jnp.arange(16.0), sharding), "free": jnp.ones(2)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        _, got, _ = checkpoints.restore(state)
    assert got["table"].sharding == sharding
    assert not got["free"].committed


def test_donated_buffers_do_not_reach_the_checkpoint(tmp_path):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    state = {"table": jnp.arange(200_000.0)}
    want = np.asarray(state["table"]).copy()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        template = {"table": overwrite(state["table"])}
        _, got, _ = checkpoints.restore(template)
    np.testing.assert_array_equal(got["table"], want)


def test_the_newest_checkpoints_stay(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 10, 9):
            assert checkpoints.save(step, {"x": jnp.ones(3)}, {})
        checkpoints.wait()
        assert checkpoints.latest_step() == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "9"]


def test_later_checkpoints_are_dropped_for_a_run_that_resumes_earlier(tmp_path):
    fill(tmp_path, 1, 2, 3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.drop_after(1)
        assert checkpoints.latest_step() == 1
    assert [path.name for path in tmp_path.glob("[0-9]*")] == ["1"]
    assert restore(tmp_path)[0] == 1


def test_a_step_is_saved_once(copy):
    with Checkpoints(copy) as checkpoints:
        assert not checkpoints.save(2, make_state(7), {})
    assert_same_bits(restore(copy)[1], make_state(2))


def flip(file, _=None):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate(file, _):
    os.truncate(file, file.stat().st_size // 2)


def delete(file, _):
    file.unlink()


def link(file, elsewhere):
    """Replaces a file by a symlink to the same bytes."""
    os.replace(file, elsewhere / "target")
    file.symlink_to(elsewhere / "target")


FILES = {
    "array_data": "default/ocdbt.process_0/d/*",
    "array_index": "default/manifest.ocdbt",
    "tree": "default/_METADATA",
    "root": "_CHECKPOINT_METADATA",
    "manifest": "manifest.json",
}


@pytest.mark.parametrize("harm", [flip, truncate, delete, link])
@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_used(
    kind, harm, copy, tmp_path, caplog
):
    file = max((copy / "2").glob(FILES[kind]), key=lambda path: path.stat().st_size)
    harm(file, tmp_path)
    step, state, _ = restore(copy)
    assert step == 1
    assert_same_bits(state, make_state(1))
    assert not (copy / "2").exists() and (copy / "2.damaged-1").is_dir()
    (record,) = [r for r in caplog.records if r.name.startswith("loka_jax")]
    assert file.name in record.getMessage() and "\n" not in record.getMessage()


def test_an_added_file_is_damage(copy):
    (copy / "2" / "default" / "d" / "extra").write_text("x")
    assert restore(copy)[0] == 1


def test_a_linked_folder_is_damage(copy, tmp_path):
    os.replace(copy / "2" / "default", tmp_path / "elsewhere")
    (copy / "2" / "default").symlink_to(tmp_path / "elsewhere")
    assert restore(copy)[0] == 1


def test_a_linked_step_is_damage(copy, tmp_path):
    os.replace(copy / "2", tmp_path / "elsewhere")
    (copy / "2").symlink_to(tmp_path / "elsewhere")
    assert restore(copy)[0] == 1


def test_a_step_under_another_number_is_damage(copy):
    os.replace(copy / "2", copy / "30")
    assert restore(copy)[0] == 1


def test_a_manifest_cannot_point_outside(copy, tmp_path):
    """Even one with digests that fit."""

    (tmp_path / "secret").write_text("x")
    path = copy / "2" / "manifest.json"
    outer = jsonfile.read(path)
    assert outer["sha256"] == sha256(jsonfile.dumps(outer["manifest"]))
    outer["manifest"]["files"]["../../secret"] = sha256("x")
    outer["sha256"] = sha256(jsonfile.dumps(outer["manifest"]))
    jsonfile.write(path, outer)
    assert restore(copy)[0] == 1


@pytest.mark.parametrize(
    "changes",
    [{"step": 7}, {"step": None}, {"meta": None}, {"leaves": []}, {"leaves": {"a": 1}}],
)
def test_a_manifest_with_other_content_is_damage(copy, changes):
    path = copy / "2" / "manifest.json"
    outer = jsonfile.read(path)
    outer["manifest"]["content"] |= changes
    outer["sha256"] = sha256(jsonfile.dumps(outer["manifest"]))
    jsonfile.write(path, outer)
    assert restore(copy)[0] == 1


def test_all_damaged_is_one_sentence_and_nothing_is_overwritten(copy, caplog):
    for step in (1, 2):
        flip(copy / str(step) / "default" / "_METADATA")
    for _ in range(2):  # a supervisor that starts the run again gets the same answer
        with pytest.raises(ValueError, match=r"no whole .*1.damaged-1, 2.damaged-1"):
            restore(copy)
        names = {path.name for path in copy.iterdir()}
        assert names == {"1.damaged-1", "2.damaged-1"}
    assert "_METADATA: differs from what was written" in caplog.text


def test_a_step_put_aside_can_be_saved_and_damaged_again(copy):
    for number in (1, 2):
        flip(copy / "2" / "default" / "_METADATA")
        assert restore(copy)[0] == 1
        assert (copy / f"2.damaged-{number}").is_dir()
        fill(copy, 2)
    assert_same_bits(restore(copy)[1], make_state(2))


def test_no_checkpoint_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="there is no checkpoint in .*--resume"):
        restore(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s._replace(step=jnp.zeros(3, jnp.int32)),
            r"'step' is int32\[\] there and int32\[3\] here",
        ),
        (
            lambda s: s._replace(fp8=s.fp8 | {"g": s.fp8["lhs"]}),
            r"'fp8/g' is float8_e5m2\[8, 16\] there and float8_e4m3fn\[8, 16\] here",
        ),
        (
            lambda s: s._replace(fp8=s.fp8 | {"new": s.step}),
            r"'fp8/new' is absent there and int32\[\] here",
        ),
        (
            lambda s: s._replace(optimizer=()),
            r"'optimizer/0/count' is int32\[\] there and absent here \(and 4 more",
        ),
        (
            lambda s: s._replace(key=jax.random.key(0, impl="rbg")),
            r"'key' is key<fry>\[2\] there and key<rbg>\[4\] here",
        ),
    ],
)
def test_a_template_that_does_not_fit_names_the_leaf(saved, change, message):
    with pytest.raises(ValueError, match=message):
        restore(saved, change(make_state(0)))
    assert (saved / "2").is_dir()  # nothing is wrong with it


def test_a_misfit_is_explained_by_the_config(saved):
    template = make_state(0)._replace(step=jnp.zeros(3))
    with pytest.raises(ValueError, match="configs differ in lr: saved 0.1, now 0.2"):
        restore(saved, template, config={"lr": 0.2})


def test_what_is_no_array_is_refused_before_anything_is_written(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="'a/n' is a int, not an array"):
            checkpoints.save(1, {"a": {"n": 3}}, {})
        with pytest.raises(ValueError, match="nan has no form in JSON"):
            checkpoints.save(1, {"a": jnp.ones(1)}, {"best": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_before_saving(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="needs 440 bytes .*100 are free .*340 b"):
            checkpoints.save(1, {"a": jnp.ones(100)}, {})


def test_space_for_all_checkpoints_is_checked_before_the_first_step(
    tmp_path, monkeypatch
):
    usage = shutil.disk_usage(tmp_path)
    state = {"a": jax.ShapeDtypeStruct((100,), jnp.float32)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1319))
        with pytest.raises(ValueError, match="needs 1,320 bytes for 3 more checkpoint"):
            require_space([checkpoints], state)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1320))
        require_space([checkpoints], state)


def test_folders_of_one_file_system_share_its_space(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    state = {"a": jax.ShapeDtypeStruct((100,), jnp.float32)}
    newest = Checkpoints(tmp_path / "checkpoints", keep=2)
    best = Checkpoints(tmp_path / "best", keep=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1320))
    with newest, best:
        require_space([newest], state)
        require_space([best], state)
        mount = r"1,320 are free on its file system \(/.*\): free 880 bytes there"
        with pytest.raises(ValueError, match=f"2,200 bytes for 5 more .*{mount}"):
            require_space([newest, best], state)


@pytest.mark.parametrize("name", ["run[1]", "a*", "b?"])
def test_a_path_under_which_nothing_is_found_again_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="wildcards .* choose another --workdir"):
        Checkpoints(tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_save_that_cannot_be_opened_again_is_no_checkpoint(tmp_path, monkeypatch):
    plain = ocp.CheckpointManager.save

    def save(self, step, args, **kwargs):
        """Saves, and loses an array."""
        kept = {name: x for name, x in args.item.items() if name != "step"}
        return plain(self, step, args=ocp.args.PyTreeSave(kept), **kwargs)

    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", save)
        checkpoints.save(1, make_state(1), {})
        with pytest.raises(OSError, match="step 1 could not be saved .*other arrays"):
            checkpoints.wait()
    assert checkpoints.latest_step() is None
    checkpoints.close()


def test_a_save_is_synced_to_the_disk_before_it_counts(tmp_path, monkeypatch):
    synced, plain = [], os.fsync

    def fsync(descriptor):
        names = {path.name for path in tmp_path.iterdir()}
        is_folder = os.path.sameopenfile(descriptor, folder)
        synced.append((is_folder, "1" in names))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = os.open(tmp_path, os.O_RDONLY)
    fill(tmp_path, 1)
    os.close(folder)
    assert synced[-1] == (True, True)  # the rename itself
    assert (False, False) in synced  # the manifest, before the rename


@pytest.mark.parametrize("read", ["_files", "_read", "_sha256"])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_no_damage(
    tmp_path, monkeypatch, read
):
    fill(tmp_path, 1)
    fill(tmp_path / "later", 2)
    plain = getattr(manifest, read)

    def removed(path):
        if (tmp_path / "1").exists():
            (tmp_path / "later" / "2").rename(tmp_path / "2")
            shutil.rmtree(tmp_path / "1")
        return plain(path)

    monkeypatch.setattr(manifest, read, removed)
    saved = Checkpoints(tmp_path).newest()
    assert saved is not None and saved.step == 2
    assert not list(tmp_path.glob("*.damaged-*"))


def fail_writes(monkeypatch, times):
    """Makes the next `times` writes of a manifest fail, as on a full disk."""
    left, write = [times], manifest.write

    def failing(path, content):
        if left[0]:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(manifest, "write", failing)


def test_a_save_that_fails_once_is_tried_again(tmp_path, monkeypatch, caplog):
    fail_writes(monkeypatch, 1)
    fill(tmp_path, 5)
    assert "saving step 5 failed (OSError: [Errno 28]" in caplog.text
    assert_same_bits(restore(tmp_path)[1], make_state(5))


@pytest.mark.parametrize("at", ["save", "wait", "close"])
def test_a_save_that_fails_twice_surfaces(at, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(4, make_state(4), {})
    checkpoints.wait()
    fail_writes(monkeypatch, 2)
    checkpoints.save(5, make_state(5), {})
    next_call = {
        "save": lambda: checkpoints.save(6, make_state(6), {}),
        "wait": checkpoints.wait,
        "close": checkpoints.close,
    }[at]
    message = (
        "step 5 could not be saved .*No space left.*the newest checkpoint is step 4"
    )
    with pytest.raises(OSError, match=message):
        next_call()
    checkpoints.close()
    assert restore(tmp_path)[0] == 4


KILLED = """
    import sys, os, signal, threading
    import jax.numpy as jnp
    from loka_jax.train.checkpoints import checkpoint, manifest

    state = {"x": jnp.arange(1000.0)}
    checkpoints = checkpoint.Checkpoints(sys.argv[1])
    checkpoints.save(1, state, {})
    checkpoints.wait()
    # Dies with step 2 written by Orbax but for its manifest.
    manifest.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.save(2, state, {})
    checkpoints.wait()
"""


@pytest.mark.slow
def test_a_killed_save_leaves_the_step_before_and_no_litter(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert (tmp_path / ".unfinished" / "2").is_dir()
    template = {"x": jnp.zeros(1000)}
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(template)[0] == 1
        assert checkpoints.save(2, template, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_the_directory_itself_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    fill(tmp_path / "link", 1)
    assert restore(tmp_path / "link")[0] == 1


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot create the checkpoint directory"):
        Checkpoints(tmp_path / "file" / "checkpoints")


def test_a_save_prints_nothing(tmp_path, capfd, caplog):
    with caplog.at_level(logging.WARNING):
        fill(tmp_path, 1)
        restore(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""
