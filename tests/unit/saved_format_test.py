"""What another version wrote is refused by one sentence that says so."""

import dataclasses
import json

import pytest

from loka_jax import jsonfile, saved_format
from loka_jax.data import Schema, open_data
from loka_jax.data.manifest import MANIFEST
from loka_jax.data.saved_encoding import digest_of, open_encoding
from loka_jax.data.settings import SETTINGS
from loka_jax.data.shards import ShardWriter, open_shards
from loka_jax.train.checkpoints import manifest
from loka_jax.train.folder.source_run import open_run
from loka_jax.train.next_day import default_config
from loka_jax.train.state import TrainState
from loka_jax.train.watch.host_state import Progress
from tests.support import train as support
from tests.support.data import table_config

SCHEMA = Schema(label="click", dense=("age",), categorical=(), vocab_sizes=())


def write_shards(path, version):
    """Writes an encoding that names this version, without the field `owners`."""
    path.mkdir()
    writer = ShardWriter(path)
    writer.finish(SCHEMA, sources=[], settings={}, report={})
    value = json.loads((path / MANIFEST).read_text())
    del value["schema"]["owners"]
    value |= {"version": version}
    if version is None:
        del value["version"]
    (path / MANIFEST).write_text(json.dumps(value))
    return path


def write_checkpoint(path, version):
    """Writes a checkpoint of this version, with a digest that fits."""
    path.mkdir(parents=True)
    manifest.write(path, {"step": 3, "leaves": {}, "meta": {}})
    inner = jsonfile.as_dict(jsonfile.read(path / MANIFEST))["manifest"]
    if version is None:
        del inner["format"]
    else:
        inner["format"] = version
    outer = {"manifest": inner, "sha256": manifest._digest(inner)}
    jsonfile.write(path / MANIFEST, outer)


def write_config(workdir, version):
    """Writes the config of a run of this version, with a field that is gone since."""
    values = support.config().identity() | {"old_field": 1}
    number = {} if version is None else {"format": version}
    jsonfile.write(workdir / "config.json", number | values)


EARLIER = "an earlier version of loka_jax wrote it"


@pytest.mark.parametrize(
    "found, reason",
    [
        (None, EARLIER),
        (2, EARLIER),
        (99, "a later version of loka_jax wrote it"),
        ("3\x1b", r"its format is '3\x1b', not 3"),
    ],
)
def test_the_reason_says_which_version(found, reason):
    assert saved_format.why_not(found, 3) == reason
    assert saved_format.why_not(3, 3) is None


@pytest.mark.parametrize("version", [None, 2])
def test_shards_of_an_earlier_version_are_refused(tmp_path, version):
    folder = write_shards(tmp_path / "shards", version)
    sentence = rf"cannot be used \({EARLIER}\): convert the data again\.$"
    with pytest.raises(ValueError, match=sentence):
        open_data(table_config(folder), seed=0)


def test_an_encoding_of_an_earlier_version_is_refused(tmp_path):
    folder = write_shards(tmp_path / "encoding", 2)
    with pytest.raises(ValueError, match=rf"encoding of the run.* \({EARLIER}\): .*"):
        open_encoding(folder, "")


@pytest.mark.parametrize("version", [None, 2])
def test_the_config_of_an_earlier_run_is_refused(tmp_path, version):
    write_config(tmp_path, version)
    sentence = rf"{tmp_path} cannot be read \({EARLIER}\): train the run again"
    for read in (
        lambda: open_run(tmp_path, best=True),
        lambda: default_config(tmp_path),
    ):
        with pytest.raises(ValueError, match=sentence):
            read()


@pytest.mark.parametrize("version", [None, 2])
def test_a_checkpoint_of_an_earlier_run_is_refused_and_stays(tmp_path, version):
    config = {"format": saved_format.RUN, **support.config().identity()}
    jsonfile.write(tmp_path / "config.json", config)
    write_checkpoint(tmp_path / "checkpoints" / "3", version)
    sentence = rf"checkpoints/3 cannot be read \({EARLIER}\): train the run again"
    with pytest.raises(ValueError, match=sentence):
        open_run(tmp_path, best=True)
    assert (tmp_path / "checkpoints" / "3").is_dir()


# The numbers are raised when these change. A number that stays lets what an earlier
# version wrote fail somewhere else, with the name of a field that nobody knows.


def test_the_form_of_shards_has_this_number(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    ShardWriter(folder).finish(SCHEMA, sources=[], settings={}, report={})
    assert open_shards(folder).schema == SCHEMA and digest_of(open_shards(folder))
    found = json.loads((folder / MANIFEST).read_text())
    form = (saved_format.SHARDS, " ".join(found), " ".join(found["schema"]))
    assert form == (
        3,
        "format version schema splits files kind sources settings standardizer report",
        "label dense categorical vocab_sizes multi owners slots weighted_multi "
        "weighted further_labels",
    )
    assert " ".join(SETTINGS) == (
        "label labels dense categorical multi multi_weights separator encoding "
        "hash_buckets hash_sizes hashed share missing nan negative huge huge_limit "
        "transform max_values min_count reserve_rows unknown weight keep_negatives "
        "valid_fraction time max_bad_rows"
    )


def test_the_form_of_a_checkpoint_has_this_number():
    progress, state = (
        " ".join(field.name for field in dataclasses.fields(part))
        for part in (Progress, TrainState)
    )
    assert (saved_format.RUN, progress, state) == (
        7,
        "step position examples seconds plateau best changes returns drift planned "
        "unsafe broken replanned guard scale_watch days",
        "step params fp8 batch_stats probe opt_state table row_state lr_scale skipped "
        "skipped_in_a_row bad_ids grad_norm metrics",
    )
