"""Opens the data a `DataConfig` describes as train, valid and test splits."""

from dataclasses import dataclass

from loka_jax.data import generated
from loka_jax.data.batch import Dataset
from loka_jax.data.config import DataConfig


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The splits of a data set.

    Attributes:
        train: the examples to learn from.
        valid: the examples that decide when to stop.
        test: the examples to judge by, if there are any apart from `valid`.
        report: what was found and done while reading, ready for JSON.
    """

    train: Dataset
    valid: Dataset
    test: Dataset | None
    report: dict


def open_data(config: DataConfig, *, seed: int) -> Splits:
    """Returns the splits of the data that `config` describes.

    Args:
        config: where the data is and what is done to it.
        seed: of the held-out splits of generated data; files do not use it.

    Raises:
        ValueError: one sentence with the file, row or option, and the remedy.
    """
    return _open_generated(config, seed)


def _open_generated(config: DataConfig, seed: int) -> Splits:
    world = generated.make_world(config)
    sizes = {
        "train": config.examples,
        "valid": config.eval_examples,
        "test": config.eval_examples,
    }
    train, valid, test = (
        generated.GeneratedDataset(config, world, name, num_examples=size, seed=seed)
        for name, size in sizes.items()
    )
    ne, ne_error = generated.best_possible_ne(config, world)
    report = {
        "source": "generated",
        "split_rule": "train, valid and test are streams of different keys",
        "examples": sizes,
        "best_possible_ne": ne,
        "best_possible_ne_stderr": ne_error,
        "true_model_ne": {
            "valid": generated.true_model_ne(valid),
            "test": generated.true_model_ne(test),
        },
    }
    return Splits(train=train, valid=valid, test=test, report=report)
