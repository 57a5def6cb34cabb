"""The loader splits, pads and orders rows, and refuses what cannot run here."""

from types import SimpleNamespace

import numpy as np
import pytest

from loka_jax.export import loader
from loka_jax.export import rows as raw
from loka_jax.train.placement import INFERENCE_OPTIONS


def model_of(sizes, tasks=("label",), calibration=None):
    """Returns a model whose logits are its dense column, and the batches that it ran.

    A second task has the logits with the other sign.
    """
    model, batches = object.__new__(loader.Model), []
    model.batch_sizes, model.tasks = sizes, tasks
    model.description = {"calibration": calibration}
    model.encoding = object.__new__(raw.Encoding)

    def program(size):
        def run(inputs):
            x = inputs.dense[:, 0]
            batches.append(x.tolist())
            assert len(x) == len(inputs.ids) == len(inputs.bags[0][0]) == size
            return x if len(tasks) == 1 else np.stack([x, -x], axis=1)

        return run

    model.program = program
    return model, batches


def inputs_of(values):
    """Returns inputs of a dense column, zeros as ids, and a list of two slots."""
    rows = len(values)
    dense = np.array(values, np.float32).reshape(rows, 1)
    ids = np.zeros((rows, 1), np.int32)
    return raw.Inputs(dense, ids, ((np.zeros((rows, 2), np.int32), None),))


@pytest.mark.parametrize(
    "rows, expected",
    [
        (1, [[0]]),
        (2, [[0, 1, 0]]),
        (3, [[0, 1, 2]]),
        (4, [[0, 1, 2, 3, 0]]),
        (6, [[0, 1, 2, 3, 4], [5]]),
        (7, [[0, 1, 2, 3, 4], [5, 6, 0]]),
        (0, []),
    ],
)
def test_rows_take_the_smallest_program_that_holds_them(rows, expected):
    model, batches = model_of((1, 3, 5))
    logits = model.logits(inputs_of(range(rows)))
    assert logits.tolist() == [*range(rows)] and batches == expected


def test_each_task_has_a_column_and_probabilities_are_those_of_float64():
    logits = model_of((2,), ("click", "buy"))[0].logits(inputs_of([1, 2, 3]))
    assert logits.tolist() == [[1, -1], [2, -2], [3, -3]]
    logits = [-800, -20, 0, 3, 800]
    exact = 1 / (1 + np.exp(-np.array(logits[1:], np.float64)))
    found = model_of((8,))[0].probabilities(inputs_of(logits))
    assert found.tolist() == [0, *exact.astype(np.float32).tolist()]


def test_logits_are_calibrated_task_by_task():
    line = {"a": [2.0, 0.5], "b": [1.0, 0.0]}
    logits = model_of((2,), ("click", "buy"), line)[0].logits(inputs_of([1, 2]))
    assert logits.dtype == np.float32 and logits.tolist() == [[3, -0.5], [5, -1]]


def test_each_request_has_the_scores_of_its_rows():
    model, batches = model_of((3, 8))
    parts = model.together([inputs_of(x) for x in ([0, 1], [2], [3, 4, 5])])
    assert batches == [[0, 1, 2, 3, 4, 5, 0, 1]]
    assert [len(part) for part in parts] == [2, 1, 3]
    assert np.array_equal(
        np.concatenate(parts), model.probabilities(inputs_of(range(6)))
    )


def test_a_folder_for_another_machine_is_refused(monkeypatch, tmp_path):
    own = {"cpu": None, "cuda": "9.0"}
    programs = [{"platform": k, "compute_capability": v} for k, v in own.items()]
    here = SimpleNamespace()
    monkeypatch.setattr(loader, "_description", lambda path: {"programs": programs})
    monkeypatch.setattr(loader.jax, "default_backend", lambda: here.backend)
    monkeypatch.setattr(loader.jax, "devices", lambda: [here])
    monkeypatch.setattr(loader, "Model", lambda folder, description, own: own)
    for backend, capability, said in (
        ("cpu", None, None),
        ("gpu", "9.0", None),
        ("gpu", "8.0", "capability 9.0, and this GPU has 8.0: export it"),
        ("tpu", None, "for cpu and cuda, and JAX runs on tpu: export it with"),
    ):
        here.backend, here.compute_capability = backend, capability
        if said is None:
            assert loader.load(tmp_path) == [programs[backend == "gpu"]]
            continue
        with pytest.raises(ValueError, match=said):
            loader.load(tmp_path)


def test_a_program_is_compiled_and_its_results_are_placed_as_evaluations(monkeypatch):
    assert loader.COMPILER_OPTIONS == INFERENCE_OPTIONS
    kinds, sharding = [], loader.jax.sharding
    place = lambda device, memory_kind: kinds.append(memory_kind)  # noqa: E731
    monkeypatch.setattr(sharding, "SingleDeviceSharding", place)
    for platform in ("cpu", "cuda"):
        loader.results_place(platform)
    assert kinds == [None, "pinned_host"]  # of a GPU to the host
