"""What another version wrote is refused by one sentence that says so."""

import dataclasses
import json

import jax
import pytest
from jax.tree_util import keystr

from loka_jax import jsonfile, saved_format
from loka_jax.data import DataConfig, Schema, open_data
from loka_jax.data.config import SETTINGS
from loka_jax.data.saved_encoding import digest_of, open_encoding
from loka_jax.data.shards import MANIFEST, ShardWriter, open_shards
from loka_jax.probe.site import ProbeConfig
from loka_jax.train.checkpoints import manifest
from loka_jax.train.folder.source_run import open_run
from loka_jax.train.next_day import default_config
from loka_jax.train.state import TrainState
from loka_jax.train.watch.host_state import Progress
from tests.support import train as support
from tests.support.data import table_config

SCHEMA = Schema(label="click", dense=("age",), categorical=(), vocab_sizes=())


EARLIER = "an earlier version of loka_jax wrote it"
AGAIN = rf"cannot be read \({EARLIER}\): train the run again"


def numbered(name, version):
    """Returns the number of a format, or nothing for early versions."""
    return {} if version is None else {name: version}


def new_shards(path):
    """Writes an encoding, and returns the values of its manifest."""
    path.mkdir()
    ShardWriter(path).finish(SCHEMA, DataConfig())
    return json.loads((path / MANIFEST).read_text())


@pytest.mark.parametrize(
    "found, reason",
    [
        (None, EARLIER),
        (2, EARLIER),
        (99, "a later version of loka_jax wrote it"),
        ("3\x1b", r"its format is '3\x1b', not 3"),
        (3, None),
    ],
)
def test_the_reason_says_which_version(found, reason):
    assert saved_format.why_not(found, 3) == reason


@pytest.mark.parametrize("version", [None, 2])
def test_shards_and_encodings_of_an_earlier_version_are_refused(tmp_path, version):
    folder = tmp_path / "shards"
    value = new_shards(folder)
    del value["schema"]["owners"], value["version"]  # as it was
    (folder / MANIFEST).write_text(json.dumps(value | numbered("version", version)))
    sentence = rf"cannot be used \({EARLIER}\): convert the data again\.$"
    with pytest.raises(ValueError, match=sentence):
        open_data(table_config(folder), seed=0)
    with pytest.raises(ValueError, match=rf"encoding of the run.* \({EARLIER}\): .*"):
        open_encoding(folder, "")


@pytest.mark.parametrize("version", [None, 2])
def test_a_run_or_checkpoint_of_an_earlier_version_is_refused(tmp_path, version):
    identity = support.config().identity() | {"old_field": 1}  # that is gone since
    jsonfile.write(tmp_path / "config.json", numbered("format", version) | identity)
    for read in (lambda path: open_run(path, best=True), default_config):
        with pytest.raises(ValueError, match=f"{tmp_path} {AGAIN}"):
            read(tmp_path)
    config = {"format": saved_format.RUN, **support.config().identity()}
    jsonfile.write(tmp_path / "config.json", config)
    step = tmp_path / "checkpoints" / "3"
    step.mkdir(parents=True)
    manifest.write(step, manifest.Saved(3, {}, {}))
    inner = jsonfile.as_dict(jsonfile.read(step / MANIFEST))["manifest"]
    inner = saved_format.without_key(inner) | numbered("format", version)
    outer = {"manifest": inner, "sha256": manifest._digest(inner)}
    jsonfile.write(step / MANIFEST, outer)
    with pytest.raises(ValueError, match=f"checkpoints/3 {AGAIN}"):
        open_run(tmp_path, best=True)
    assert step.is_dir()


# The numbers are raised when these change. A number that stays lets what an earlier
# version wrote fail somewhere else, with the name of a field that nobody knows.


def test_the_form_of_shards_has_this_number(tmp_path):
    found = new_shards(tmp_path / "shards")
    folder = open_shards(tmp_path / "shards")
    assert folder.schema == SCHEMA and digest_of(folder)
    form = (saved_format.SHARDS, " ".join(found), " ".join(found["schema"]))
    assert form == (
        7,
        "format version schema files config forms constants report",
        "label dense categorical multi further_labels user context actions vocab_sizes "
        "owners slots weighted_multi weighted",
    )
    assert " ".join(found["config"]) == (
        "kind path train valid test label labels dense categorical multi "
        "multi_weights separator max_values encoding min_count reserve_rows "
        "hash_buckets hash_sizes hashed share bad transform weight keep_negatives "
        "valid_fraction time user lists context actions history targets interleave "
        "row_capacity stream max_bad_rows cache examples eval_examples rows signal "
        "click_rate"
    )
    assert " ".join(SETTINGS) == (
        "label labels dense categorical multi multi_weights separator encoding "
        "hash_buckets hash_sizes hashed share bad transform user lists context actions "
        "max_values min_count reserve_rows weight keep_negatives valid_fraction "
        "time max_bad_rows"
    )


def test_the_form_of_a_checkpoint_has_this_number():
    forms = [
        " ".join(x.name for x in dataclasses.fields(p)) for p in (Progress, TrainState)
    ]
    site = jax.eval_shape(lambda: ProbeConfig().init(6, 4, 10))  # of 6 and 10 features
    statistics, _ = jax.tree_util.tree_flatten_with_path(site)
    shapes = (f"{keystr(at)[1:]}{[*x.shape]}" for at, x in statistics)
    forms.append(" ".join(shapes).replace(", ", ","))
    assert (saved_format.RUN, *forms) == (
        18,
        "step position examples seconds plateau best changes returns drift "
        "unsafe broken replanned confirmed guard scale_watch days "
        "alarms",
        "step params fp8 batch_stats probe opt_state table row_state lr_scale skipped "
        "skipped_in_a_row bad_ids grad_norm metrics",
        "lhs.moments.count[] lhs.moments.mean[4] lhs.moments.scatter[1,4,4] "
        "lhs.norms[160] lhs.elements.values[10] rhs.normal.steps[] rhs.normal.moves[] "
        "rhs.normal.mean[4,10] rhs.normal.rows[1,4,4] rhs.normal.columns[1,10,10] "
        "rhs.elements.values[10] g.moments.count[] g.moments.mean[10] "
        "g.moments.scatter[1,10,10] g.norms[160] g.elements.values[10] errors.steps[] "
        "errors.sums[3,3,3,4] errors.amaxes[3] errors.monitors[200,11]",
    )
