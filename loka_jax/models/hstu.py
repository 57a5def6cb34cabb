"""HSTU (Zhai et al., arXiv 2402.17152) for ranking, as MLPerf's dlrm_v4_hstu has it.

    i_c   = item_mlp([e_1; ...; e_K])                      [C, D]   of a row's fields
    x_c   = i_c + answer[a_c] + position[p_c] + age[t_c]   [C, D]
    X     = the fields of a sample, projected, in the first P rows of its sequence
    X'    = hstu_layer(X)                                  [C, D]   L times
    logit = head(head_mlp(norm(x'_c) * i_c))               [N] of a candidate's row c

`EventModel` tells what is added to events. C is the number of rows of all sequences of
a batch, B that of sequences, K of fields of an event, P of fields of a sample, N of
candidates, T of tasks.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax import nn
from loka_jax.models.events import Embeddings, EventModel


class Hstu(EventModel):
    """HSTU, from gathered embeddings of an event log to a logit for each candidate.

    Attributes:
        qk_dim: of a head's queries and keys.
        v_dim: of a head's values.
        max_length: the most rows of a sequence, which scores are divided by.
        window: the newest rows that a row sees, beside those of the sample; None for
            all.
        oldest: rows after those of the sample that are seen whatever the window; none
            if None.
        truncate_after: layers after which only the newest rows of a sequence go on;
            None for no truncation.
        truncate_to: rows that go on, with one candidate.

    References:
        mlcommons/training, recommendation_v4; ULTRA-HSTU, arXiv 2602.16986, for window
        and truncation.
    """

    qk_dim: int = 128
    v_dim: int = 128
    window: int | None = None
    oldest: int | None = None
    truncate_after: int | None = None
    truncate_to: int = 256

    @linen.nowrap
    def _check(self, events: Any) -> None:
        is_truncated = self.truncate_after in range(self.num_layers)
        if is_truncated and events.candidates is None:
            raise ValueError(
                "--truncate-after leaves out events that are to be predicted: set "
                "--data.targets last."
            )

    @linen.nowrap
    def _candidates(
        self, embeddings: Embeddings, events: Any, train: bool
    ) -> Float[Array, "N D"]:
        context, fields = embeddings
        items = self._items(fields, train)
        x = self._with_context(items + self._features_of(events), context, events)
        x = self._begun(x, train)
        offsets, targets = events.offsets, events.targets
        contextual, candidates = events.contextual, events.candidates
        for layer in range(self.num_layers):
            if layer == self.truncate_after:
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
        users = self._last_norm(x[targets], "layer", train)
        return users * items[events.targets]

    @linen.nowrap
    def _layer(self, number: int) -> nn.HstuLayer:
        return nn.HstuLayer(
            **self.of_layers,
            qk_dim=self.qk_dim,
            v_dim=self.v_dim,
            max_length=self.max_length,
            window=self.window,
            oldest=self.oldest or 0,
            recipe=self.recipe,
            use_bias=self.bias,
            implementation=self.implementation,
            name=f"layer_{number}",
        )

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
