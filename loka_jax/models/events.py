"""What models of event logs share: rows of events, positions, ages and answers.

    i_c   = item_mlp([e_1; ...; e_K])                      [C, D]   of a row's fields
    f_c   = answer[a_c] + position[p_c] + age[t_c]         [C, D]

    a branch B of a layer    x + B(norm(x)),   or with --branch-norm    x + norm(B(x))

An event is a row with its answers, or two rows, without and with them, as the data lay
it out; a candidate has none. Positions are counted from the end of a sequence, ages are
in buckets of the square root of the time before the candidate.

C is the number of rows of all sequences of a batch, K that of fields of an event.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jaxtyping import Array, Float, Int32

from loka_jax import nn
from loka_jax.models.ranking import RankingModel

# Of the fields of samples, and of events.
type Embeddings = tuple[Float[Array, "B P d"], Float[Array, "C K d"]]

_STD = 0.02  # of vectors that are added to those of events, at the start


def _waves(key: Array, shape: tuple[int, int], dtype: Any) -> Float[Array, "P D"]:
    """Returns sines and cosines of positions, to begin with.

    A row finds those at some distance by one linear map, wherever it stands; of random
    vectors it would have to learn each pair (Vaswani et al., arXiv 1706.03762, 3.5).
    """
    del key
    position, feature = np.indices(shape)
    angles = position * 1e-4 ** (feature // 2 * 2 / shape[1]) + feature % 2 * np.pi / 2
    return jnp.asarray(_STD * np.sqrt(2.0) * np.sin(angles), dtype)


class EventModel(RankingModel):
    """Base of the models of event logs.

    Attributes:
        dim: D.
        num_layers: number of layers.
        num_heads: heads of a layer's attention.
        item_mlp: widths of the MLP of an event's fields before its last layer.
        head_mlp: widths of the MLP before the head.
        max_length: the most rows of a sequence.
        age_buckets: number of buckets of ages.
        age_unit: seconds in the first bucket.
        num_tasks: labels of a candidate.
        branch_norm: layers normalize what they add, not what they read, by an RMSNorm
            whose gain is 1 / sqrt(num_layers) at the start; and no norm follows the
            last one.
        qk_norm: a bound on queries and keys, see `nn.QkNorm`.
        input_scale: factor of what the first layer reads. Without norms there it should
            have a variance of one.
        input_dropout_rate: dropout rate of what the first layer reads.
        layer_dropout_rate: dropout rate in the layers.
        one_candidate: the candidate changes the rows of its history, so that each needs
            a sequence of its own.
    """

    takes_events: ClassVar[bool] = True
    one_candidate: ClassVar[bool] = False

    dim: int = 512
    num_layers: int = 3
    num_heads: int = 4
    item_mlp: tuple[int, ...] = (512,)
    head_mlp: tuple[int, ...] = (512,)
    max_length: int = 4096
    age_buckets: int = 2048
    age_unit: float = 60.0
    num_tasks: int = 1
    branch_norm: bool = False
    qk_norm: nn.QkNormName = "none"
    input_scale: float = 1.0
    input_dropout_rate: float = 0.0
    layer_dropout_rate: float = 0.0

    @property
    def of_layers(self) -> dict[str, Any]:
        """The options that all layers have."""
        gain = self.num_layers**-0.5 if self.branch_norm else None
        return dict(
            num_heads=self.num_heads,
            branch_gain=gain,
            qk_norm=self.qk_norm,
            dropout_rate=self.layer_dropout_rate,
        )

    @linen.compact
    def __call__(
        self,
        dense_features: Float[Array, "B 0"],
        embeddings: Embeddings,
        events: Any,
        *,
        train: bool = False,
    ) -> Float[Array, "N"] | Float[Array, "N T"]:
        """Returns float32 logits.

        Args:
            dense_features: none; event logs have no such columns.
            embeddings: of the fields of the samples, and of the events.
            events: the sequences of the batch, `loka_jax.data.Events`.

        Raises:
            ValueError: if options do not fit each other, or these events.
        """
        del dense_features
        self._check(events)
        x = self._candidates(embeddings, events, train)
        mlp = self._mlp("head_mlp", self.head_mlp, dropout_rate=self.dropout_rate)
        hidden = mlp(x, train=train)
        logits = nn.Dense(self.num_tasks, recipe="f32", name="head")(hidden)
        return logits if self.num_tasks > 1 else logits[:, 0]

    @linen.nowrap
    def _check(self, events: Any) -> None:
        """Raises ValueError if options do not fit each other, or these events."""

    @linen.nowrap
    def _candidates(
        self, embeddings: Embeddings, events: Any, train: bool
    ) -> Float[Array, "N _"]:
        """Returns what the head reads of each candidate."""
        raise NotImplementedError

    @linen.nowrap
    def _histories(
        self, embeddings: Embeddings, events: Any
    ) -> tuple[Int32[Array, " C"], nn.Histories]:
        """Returns the rows of histories, and where they lie, see `nn.histories_of`."""
        context, fields = embeddings
        return nn.histories_of(
            events.offsets,
            events.targets,
            len(fields),
            contexts=context.shape[1],
            candidates=events.candidates,
        )

    @linen.nowrap
    def _begun(self, x: Float[Array, "*n D"], train: bool) -> Float[Array, "*n D"]:
        """Returns what the first layer reads."""
        x = x if self.input_scale == 1 else x * self.input_scale
        return nn.Dropout(self.input_dropout_rate, deterministic=not train)(x)

    @linen.nowrap
    def _last_norm(self, x: Array, norm: nn.NormName, train: bool) -> Array:
        norm = "none" if self.branch_norm else norm
        return nn.normalize(x, norm, train=train, name="norm_out")

    @linen.nowrap
    def _items(self, fields: Float[Array, "C K d"], train: bool) -> Float[Array, "C D"]:
        mlp = self._mlp("item_mlp", (*self.item_mlp, self.dim), ends_linear=True)
        return mlp(jax.lax.collapse(fields.astype(self.compute_dtype), 1), train=train)

    @linen.nowrap
    def _tokens(
        self, known: tuple[Array, ...], count: int, hidden: tuple[int, ...], train: bool
    ) -> Float[Array, "N n D"]:
        """Returns so many vectors of all that is known of candidates.

        Args:
            known: their fields, and those of their samples.
            count: n.
            hidden: widths of the MLP before its last layer.
            train: as of the model.
        """
        fields = jnp.concatenate(known, axis=1).astype(self.compute_dtype)
        mlp = self._mlp("tokens", (*hidden, count * self.dim), ends_linear=True)
        made = mlp(jax.lax.collapse(fields, 1), train=train)
        return made.reshape(-1, count, self.dim)

    @linen.nowrap
    def _features_of(
        self, events: Any, *, has_positions: bool = True
    ) -> Float[Array, "C D"]:
        """Returns the sum of the vectors of answers, positions and ages."""
        ages = jnp.sqrt(jnp.maximum(events.ages, 0) / self.age_unit).astype(jnp.int32)
        lookups = [("position", self.max_length, events.positions)] * has_positions
        lookups += [("age", self.age_buckets, ages)]
        lookups += [
            (f"answer_{task}", 3, answer)
            for task, answer in enumerate(events.answers.T)
        ]
        tables = [
            self.param(
                name,
                _waves if name == "position" else linen.initializers.normal(_STD),
                (count, self.dim),
                jnp.float32,
            )
            for name, count, _ in lookups
        ]
        indices = tuple(index for *_, index in lookups)
        return nn.sum_of_rows(tuple(tables), indices, self.compute_dtype)
