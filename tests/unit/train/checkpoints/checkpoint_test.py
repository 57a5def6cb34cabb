import contextlib
import hashlib
import os
import shutil
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from loka_jax import jsonfile
from loka_jax.train.checkpoints import manifest, orbax_files
from loka_jax.train.checkpoints.checkpoint import Checkpoints, require_space
from tests.support.train import digest


def make_state(seed):
    """Returns a state with every kind of leaf a run holds."""
    x = jax.random.normal(jax.random.key(seed), (8, 16), jnp.float32)
    params = {"dense_0": {"kernel": x, "bias": x[0].astype(jnp.bfloat16)}}
    return {
        "params": params,
        "optimizer": optax.adam(1e-3).init(params),
        "fp8": {"lhs": x.astype(jnp.float8_e4m3fn), "g": x.astype(jnp.float8_e5m2)},
        "specials": jnp.float32([np.nan, np.inf, -0.0, 1e-42]),
        "none": jnp.zeros((0, 4)),
        "words": np.arange(seed, seed + 3),
        "step": jnp.int32(seed),
    }


def assert_same_bits(got, want):
    assert jax.tree.map(type, got) == jax.tree.map(type, want)
    assert digest(got) == digest(want)


def fill(directory, *steps):
    with Checkpoints(directory) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {"config": {"lr": 0.1}})


def restore(directory, template=None):
    with Checkpoints(directory) as checkpoints:
        saved = checkpoints.newest()
        state = checkpoints.read(saved, template or make_state(0))
        return saved.step, state, saved.meta


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


def test_donated_buffers_do_not_reach_the_checkpoint(tmp_path):
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    state = {"table": jnp.arange(200_000.0)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        template = {"table": overwrite(state["table"])}
        got = checkpoints.read(checkpoints.newest(), template)
    np.testing.assert_array_equal(got["table"], np.arange(200_000.0))


def test_the_newest_checkpoints_stay(tmp_path, caplog):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 10, 9):
            checkpoints.save(step, {"x": jnp.ones(3)}, {})
        checkpoints.wait()
        assert checkpoints.latest_step() == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "9"]
    assert not caplog.records  # as all went well


def test_a_step_is_saved_once_unless_a_run_resumes_earlier(copy):
    with Checkpoints(copy) as checkpoints:
        checkpoints.save(2, make_state(7), {})
        assert_same_bits(restore(copy)[1], make_state(2))
        checkpoints.drop_after(1)
        assert checkpoints.latest_step() == 1
    assert [path.name for path in copy.glob("[0-9]*")] == ["1"]


def flip(file, _=None):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("change", ["step", "../../secret"])
def test_a_manifest_with_other_content_is_damage(copy, tmp_path, change):
    """Even one with digests that fit."""
    (tmp_path / "secret").write_text("x")
    path, sha256 = copy / "2" / "manifest.json", lambda x: hashlib.sha256(x).hexdigest()
    manifest = jsonfile.read(path)["manifest"]
    if change == "step":
        manifest["content"]["step"] = 7
    else:
        manifest["files"][change] = sha256(b"x")
    digest = sha256(jsonfile.dumps(manifest).encode())
    jsonfile.write(path, {"manifest": manifest, "sha256": digest})
    assert restore(copy)[0] == 1


def link_to(path, elsewhere):
    """Replaces a path by a symlink to the same bytes."""
    os.replace(path, elsewhere / "target")
    path.symlink_to(elsewhere / "target")


@pytest.mark.parametrize(
    "harm, name",
    [
        (flip, "default/ocdbt.process_0/d/*"),
        (flip, "manifest.json"),
        (lambda file, _: os.truncate(file, 9), "default/manifest.ocdbt"),
        (lambda file, _: file.unlink(), "default/_METADATA"),
        (link_to, "_CHECKPOINT_METADATA"),
        (link_to, "default"),
        (link_to, ""),
        (lambda step, _: (step / "default" / "d" / "extra").touch(), ""),
        (lambda step, _: os.replace(step, step.parent / "30"), ""),
    ],
)
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_used(
    name, harm, copy, tmp_path, caplog
):
    found = (copy / "2").glob(name) if name else [copy / "2"]
    path = max(found, key=lambda path: path.stat().st_size)
    harm(path, tmp_path)
    step, state, _ = restore(copy)
    assert step == 1
    assert_same_bits(state, make_state(1))
    assert not (copy / "2").exists() and any(copy.glob("*.damaged-1"))
    (record,) = [r for r in caplog.records if r.name.startswith("loka_jax")]
    assert name in ("", "default") or path.name in record.getMessage()


def test_all_damaged_is_one_sentence_and_nothing_is_overwritten(copy):
    for step in (1, 2):
        flip(copy / str(step) / "default" / "_METADATA")
    for _ in range(2):  # a supervisor that starts the run again gets the same answer
        with pytest.raises(ValueError, match=r"no whole .*1.damaged-1, 2.damaged-1"):
            restore(copy)
    assert {path.name for path in copy.iterdir()} == {"1.damaged-1", "2.damaged-1"}


def test_a_template_that_does_not_fit_names_the_leaf(saved):
    reason = r"'step' is int32\[\] there and int32\[3\] here: resume with the config"
    with pytest.raises(ValueError, match=reason):
        restore(saved, make_state(0) | {"step": jnp.zeros(3, jnp.int32)})
    assert (saved / "2").is_dir()  # nothing is wrong with it


def test_space_is_checked_before_the_first_step_and_before_each_save(
    tmp_path, monkeypatch
):
    usage = shutil.disk_usage(tmp_path)
    state = {"a": np.ones(100, np.float32)}  # 440 bytes on the disk
    newest = Checkpoints(tmp_path / "checkpoints", keep=2)
    best = Checkpoints(tmp_path / "best", keep=1)

    def free(size):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=size))

    def needs(folders, count):
        free(440 * count)
        require_space(folders, state)
        free(440 * count - 1)
        what = f"needs {440 * count:,} bytes for {count} more"
        with pytest.raises(ValueError, match=what):
            require_space(folders, state)

    with newest, best:
        needs([newest], 3)
        needs([newest, best], 5)  # folders of one file system share its space
        free(440)
        newest.save(1, state, {})
        newest.wait()
        free(439)
        with pytest.raises(ValueError, match="needs 440 bytes .*439 are free"):
            newest.save(2, state, {})
        needs([newest], 2)  # one more is kept, and one in progress


def test_a_folder_that_cannot_hold_checkpoints_is_refused(tmp_path):
    for name in ("run[1]", "b?"):
        with pytest.raises(ValueError, match="wildcards .* choose another --workdir"):
            Checkpoints(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_save_that_cannot_be_opened_again_is_no_checkpoint(tmp_path, monkeypatch):
    plain = orbax_files.write

    def write(path, arrays):  # loses an array
        plain(path, {name: x for name, x in arrays.items() if name != "step"})

    monkeypatch.setattr(orbax_files, "write", write)
    checkpoints = Checkpoints(tmp_path)
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


@pytest.mark.parametrize("failures, newest", [(1, 5), (2, 2)])
def test_a_save_that_fails_is_tried_again_and_then_surfaces(
    copy, monkeypatch, failures, newest
):
    full, plain = OSError(28, "No space left on device"), manifest.write
    write = mock.Mock(side_effect=[full] * failures + [mock.DEFAULT], wraps=plain)
    monkeypatch.setattr(manifest, "write", write)
    message = "step 5 could not be saved .*No space left.*checkpoint is step 2"
    fails = pytest.raises(OSError, match=message)
    checkpoints = Checkpoints(copy)
    checkpoints.save(5, make_state(5), {})
    with fails if failures == 2 else contextlib.nullcontext():
        checkpoints.wait()
    checkpoints.close()
    step, state, _ = restore(copy)
    assert step == newest
    assert_same_bits(state, make_state(step))
