"""Generated click logs whose best possible normalized entropy is known.

Example i of epoch e is a pure function of (seed, split, e, i), so the data does not
depend on the batch size (except for float32 rounding), and any position can be read
directly, on the device. Columns and labels are those of a planted model, see
`planted`.

B is the batch size, n the number of dense columns, F the number of fields.
"""

import copy
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, UInt

from loka_jax.data.batch import (
    WHOLE,
    Batch,
    Dataset,
    Part,
    Position,
    Schema,
    examples_of,
)
from loka_jax.data.config import DataConfig
from loka_jax.data.planted import NUM_DENSE, STREAMS, World, draw, true_logit


def _dense(z: Float[Array, "B n"]) -> Float[Array, "B n"]:
    """Returns log(1 + count) of log-normal counts as skewed as Criteo's, standardized.

    For data from files, `--data.transform standardize` has the same effect.
    """
    column = jnp.arange(NUM_DENSE, dtype=jnp.float32)[None, :] / (NUM_DENSE - 1)
    center, spread = 0.5 + 4.0 * column, 0.8 + 0.6 * column
    return (jnp.log1p(jnp.exp(center + spread * z)) - center) / spread


@functools.partial(jax.jit, static_argnames=("config", "batch_size", "sharding"))
def _make(
    config: DataConfig,
    world: World,
    batch_size: int,
    place: UInt[Array, "5"],
    sharding: NamedSharding | None = None,
):
    """Returns the batch at `place` and its true logits.

    `place` is split, seed, epoch, first example and number of examples, in one array
    because five separate transfers to a GPU took longer than making the batch. With a
    sharding each device makes its own examples.
    """
    split, seed, epoch, start, num_examples = place
    key = jax.random.fold_in(jax.random.key(seed), split)
    key = jax.random.fold_in(key, epoch)
    index = start + jnp.arange(batch_size, dtype=jnp.uint32)
    if sharding is not None:
        index = jax.lax.with_sharding_constraint(index, sharding)
    z, ids, uniform = draw(config, key, index)
    logit = true_logit(config, world, z, ids)
    labels = (uniform < jax.nn.sigmoid(logit)).astype(jnp.float32)
    weights = (index < num_examples).astype(jnp.float32)
    outputs = Batch(_dense(z), ids, labels, weights), logit
    if sharding is None:
        return outputs
    return jax.lax.with_sharding_constraint(outputs, sharding)


def schema_of(config: DataConfig) -> Schema:
    """Returns the columns and table sizes of generated click logs."""
    return Schema(
        label="click",
        dense=tuple(f"I{j + 1}" for j in range(NUM_DENSE)),
        categorical=tuple(f"C{f + 1}" for f in range(len(config.rows))),
        vocab_sizes=config.rows,
    )


def split_sizes(config: DataConfig) -> dict[str, int]:
    """Returns the number of examples of each split."""
    held_out = config.eval_examples
    return {"train": config.examples, "valid": held_out, "test": held_out}


class GeneratedDataset(Dataset):
    """A split of generated click logs.

    The training split is a stream keyed by the position's seed; every epoch reads new
    examples. The held-out splits are fixed: they ignore the position's epoch and seed,
    so every evaluation sees the same examples.
    """

    def __init__(
        self,
        config: DataConfig,
        world: World,
        split: str,
        *,
        num_examples: int,
        seed: int,
    ):
        """Opens a split; `seed` selects the examples of a held-out split."""
        if split not in STREAMS:
            raise ValueError(f"{split=} must be one of {sorted(STREAMS)}.")
        self.schema = schema_of(config)
        self.num_examples = num_examples
        self._config, self._world, self._split = config, world, split
        self._seed = seed
        self._sharding: NamedSharding | None = None

    def batch(
        self, position: Position, batch_size: int, *, shuffle: bool, part: Part = WHOLE
    ) -> Batch:
        """Returns a part of the batch at `position`, made on JAX's default device.

        Where the split is spread over devices (`spread_over`) a batch lies on all of
        them. Held-out splits read only the position's step. `shuffle` is ignored: the
        examples of a stream are independent.
        """
        del shuffle
        return self.batch_and_logit(position, batch_size, part)[0]

    def batch_and_logit(
        self, position: Position, batch_size: int, part: Part = WHOLE
    ) -> tuple[Batch, Float[Array, "B"]]:
        """Returns a part of the batch at `position` and the planted model's logits."""
        examples = examples_of(self, position, batch_size, part)
        is_train = self._split == "train"
        place = (
            STREAMS[self._split],
            (position.seed if is_train else self._seed) % 2**32,
            position.epoch if is_train else 0,
            examples.start,
            self.num_examples,
        )
        place = np.array(place, np.uint32)
        return _make(self._config, self._world, len(examples), place, self._sharding)


def spread_over(
    sharding: NamedSharding, *splits: GeneratedDataset
) -> list[GeneratedDataset]:
    """Returns splits of one world with batches that each device makes its part of."""
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    world = jax.device_put(splits[0]._world, everywhere)

    def spread(split: GeneratedDataset) -> GeneratedDataset:
        result = copy.copy(split)
        result._world, result._sharding = world, sharding
        return result

    return list(map(spread, splits))


def best_possible_ne(
    config: DataConfig, world: World, num_examples: int = 1 << 20
) -> tuple[float, float]:
    """Returns the normalized entropy of the true probabilities and its standard error.

    `NE = mean_i H(p_i) / H(mean_i p_i)` with `H(p) = -p log p - (1-p) log(1-p)` is the
    result of the planted model itself on unlimited data. The standard error comes from
    the delta method; the examples belong to none of the data's splits.
    """
    stream = GeneratedDataset(
        config, world, "measure", num_examples=num_examples, seed=0
    )
    logit, _ = _logits_and_labels(stream)
    p = 1 / (1 + np.exp(-logit))
    # H in terms of the logit, which stays precise where p is close to 0 or 1.
    entropy = np.logaddexp(0.0, logit) - p * logit
    mean = p.mean()
    base = _binary_entropy(mean)
    ne = entropy.mean() / base
    slope = math.log1p(-mean) - math.log(mean)  # dH/dp
    influence = (entropy - ne * slope * (p - mean)) / base
    return float(ne), float(influence.std() / math.sqrt(num_examples))


def true_model_ne(dataset: GeneratedDataset) -> float:
    """Returns the normalized entropy of the true probabilities on a split's labels.

    It differs from `best_possible_ne` by the sampling noise of the split's labels,
    which affects every model evaluated on them. NaN if all labels are equal.
    """
    logit, label = _logits_and_labels(dataset)
    log_loss = np.mean(np.logaddexp(0.0, logit) - label * logit)
    mean = float(label.mean())
    return float(log_loss / _binary_entropy(mean)) if 0 < mean < 1 else math.nan


def _binary_entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log1p(-p)


def _logits_and_labels(dataset: GeneratedDataset) -> tuple[np.ndarray, np.ndarray]:
    """Returns the true logits and the labels of a whole split, in float64."""
    block = 1 << 14  # the same for every split, so that it compiles once
    logits, labels = [], []
    for step in range(dataset.num_batches(block)):
        batch, logit = dataset.batch_and_logit(Position(0, step, 0), block)
        logits.append(np.asarray(logit, np.float64))
        labels.append(np.asarray(batch.labels, np.float64))
    count = dataset.num_examples
    return np.concatenate(logits)[:count], np.concatenate(labels)[:count]
