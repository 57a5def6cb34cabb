"""HSTU (Zhai et al., arXiv 2402.17152) for ranking, as MLPerf's dlrm_v4_hstu has it.

    i_c   = item_mlp([e_1; ...; e_K])                      [C, D]   of a row's fields
    x_c   = i_c + answer[a_c] + position[p_c] + age[t_c]   [C, D]
    X     = the fields of a sample, projected, in the first P rows of its sequence
    X'    = hstu_layer(X)                                  [C, D]   L times
    logit = head(head_mlp(norm(x'_c) * i_c))               [N] of a candidate's row c

An event is a row with its answers, or two rows, without and with them, as the data lay
it out; a candidate has none. Positions are counted from the end of a sequence, ages are
in buckets of the square root of the time before the candidate.

C is the number of rows of all sequences of a batch, B that of sequences, K of fields of
an event, P of fields of a sample, N of candidates, T of tasks.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from jaxtyping import Array, Float

from loka_jax import nn
from loka_jax.models.ranking import RankingModel

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


class Hstu(RankingModel):
    """HSTU, from gathered embeddings of an event log to a logit for each candidate.

    Attributes:
        dim: D.
        num_layers: L.
        num_heads: heads of a layer.
        qk_dim: of a head's queries and keys.
        v_dim: of a head's values.
        item_mlp: widths of the MLP of an event's fields before its last layer.
        head_mlp: widths of the MLP of a candidate.
        max_length: the most rows of a sequence, which scores are divided by.
        age_buckets: number of buckets of ages.
        age_unit: seconds in the first bucket.
        window: the newest rows that a row sees, beside those of the sample; None for
            all.
        oldest: rows after those of the sample that are seen whatever the window; none
            if None.
        truncate_after: layers after which only the newest rows of a sequence go on;
            None for no truncation.
        truncate_to: rows that go on, with one candidate.
        num_tasks: labels of a candidate.
        input_dropout_rate: dropout rate of the rows before the first layer.
        layer_dropout_rate: dropout rate in the layers.

    References:
        mlcommons/training, recommendation_v4; ULTRA-HSTU, arXiv 2602.16986, for window
        and truncation.
    """

    takes_events: ClassVar[bool] = True

    dim: int = 512
    num_layers: int = 3
    num_heads: int = 4
    qk_dim: int = 128
    v_dim: int = 128
    item_mlp: tuple[int, ...] = (512,)
    head_mlp: tuple[int, ...] = (512,)
    max_length: int = 4096
    age_buckets: int = 2048
    age_unit: float = 60.0
    window: int | None = None
    oldest: int | None = None
    truncate_after: int | None = None
    truncate_to: int = 256
    num_tasks: int = 1
    input_dropout_rate: float = 0.0
    layer_dropout_rate: float = 0.0

    @linen.compact
    def __call__(
        self,
        dense_features: Float[Array, "B 0"],
        embeddings: tuple[Float[Array, "B P d"], Float[Array, "C K d"]],
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
            ValueError: if sequences whose events are all to be predicted are truncated.
        """
        del dense_features
        context, fields = embeddings
        items = self._mlp("item_mlp", (*self.item_mlp, self.dim), ends_linear=True)(
            jax.lax.collapse(fields.astype(self.compute_dtype), 1), train=train
        )
        x = self._with_context(items + self._features_of(events), context, events)
        x = linen.Dropout(self.input_dropout_rate, deterministic=not train)(x)
        offsets, targets = events.offsets, events.targets
        contextual, candidates = events.contextual, events.candidates
        for layer in range(self.num_layers):
            if layer == self.truncate_after:
                if candidates is None:
                    raise ValueError(
                        "--truncate-after leaves out events that are to be predicted: "
                        "set --data.targets last."
                    )
                counts = candidates + (self.truncate_to - 1)
                most = len(counts) * (self.truncate_to - 1) + len(targets)
                x, offsets, targets = nn.newest_rows(x, offsets, targets, counts, most)
                contextual = None
            x = self._layer(layer)(
                x,
                offsets,
                num_contextual=contextual,
                num_candidates=candidates,
                train=train,
            )
        users = nn.normalize(x[targets], "layer", train=train, name="norm_out")
        mlp = self._mlp("head_mlp", self.head_mlp, dropout_rate=self.dropout_rate)
        hidden = mlp(users * items[events.targets], train=train)
        logits = nn.Dense(self.num_tasks, recipe="f32", name="head")(hidden)
        return logits if self.num_tasks > 1 else logits[:, 0]

    @linen.nowrap
    def _layer(self, number: int) -> nn.HstuLayer:
        return nn.HstuLayer(
            num_heads=self.num_heads,
            qk_dim=self.qk_dim,
            v_dim=self.v_dim,
            max_length=self.max_length,
            window=self.window,
            oldest=self.oldest or 0,
            dropout_rate=self.layer_dropout_rate,
            recipe=self.recipe,
            use_bias=self.bias,
            implementation=self.implementation,
            name=f"layer_{number}",
        )

    @linen.nowrap
    def _features_of(self, events: Any) -> Float[Array, "C D"]:
        """Returns the sum of the vectors of answers, positions and ages."""
        ages = jnp.sqrt(jnp.maximum(events.ages, 0) / self.age_unit).astype(jnp.int32)
        lookups = [
            ("position", self.max_length, events.positions),
            ("age", self.age_buckets, ages),
        ]
        lookups += [
            (f"answer_{task}", 3, answer)
            for task, answer in enumerate(events.answers.T)
        ]
        total = 0.0
        for name, count, index in lookups:
            initial = _waves if name == "position" else linen.initializers.normal(_STD)
            table = self.param(name, initial, (count, self.dim), jnp.float32)
            total = total + table[jnp.minimum(index, count - 1)]
        return jnp.asarray(total).astype(self.compute_dtype)

    @linen.nowrap
    def _with_context(
        self, x: Float[Array, "C D"], context: Float[Array, "B P d"], events: Any
    ) -> Float[Array, "C D"]:
        """Returns the rows with those of the samples' fields in their places."""
        offsets, count = events.offsets, context.shape[1]
        if not count:
            return x
        context = context.astype(x.dtype)
        rows = nn.Dense(self.dim, recipe=self.recipe, name="context")(context)
        places = offsets[:-1, None] + jnp.arange(count)[None, :]
        is_empty = (jnp.diff(offsets) == 0)[:, None]
        places = jnp.where(is_empty, x.shape[0], places)  # dropped
        return x.at[places].add(rows, mode="drop")
