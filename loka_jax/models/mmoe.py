"""MMoE (Ma et al., KDD 2018, doi 10.1145/3219819.3220007): several tasks, one model.

    x     = [d; p], the features of DLRM                    [B, p]
    f_i   = expert_i(x)                                     [B, n]   i = 1 ... E
    g_t   = softmax(W_t x)                                  [B, E]   eq. 7
    f^t   = sum_i g_t,i f_i                                 [B, n]   eq. 6
    y_t   = head_t(tower_t(f^t))                            [B]      eq. 5, t = 1 ... T

With one expert the gates are 1, and this is the shared bottom (Caruana 1997; eq. 1):

    y_t   = head_t(tower_t(f_1))

B is the batch, T the number of tasks, E the number of experts.
"""

import jax
import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax import nn
from loka_jax.models.dlrm import DlrmFeatures


class Mmoe(DlrmFeatures):
    """A multi-gate mixture of experts, from gathered embeddings to a logit a task.

    The gates are float32, as the heads are.

    Attributes:
        num_tasks: number of tasks, the labels of the data.
        num_experts: number of experts that all tasks share; 1 for a shared bottom.
        expert_mlp: widths of each expert.
        tower_mlp: widths of each task's tower.
    """

    num_tasks: int = 2
    num_experts: int = 4
    expert_mlp: tuple[int, ...] = (512, 256)
    tower_mlp: tuple[int, ...] = (128,)

    @linen.compact
    def __call__(
        self,
        dense_features: Float[Array, "B n"],
        embeddings: Float[Array, "B F D"],
        *,
        train: bool = False,
    ) -> Float[Array, "B T"] | Float[Array, "B"]:
        """Returns float32 logits; [B] of a single task."""
        x = self._features(dense_features, embeddings, train)
        experts = [
            self._mlp(f"expert_{i}", self.expert_mlp)(x, train=train)
            for i in range(self.num_experts)
        ]
        logits = [
            self._logit(task, mixed, train)
            for task, mixed in enumerate(self._mix(x, experts))
        ]
        joined = jnp.stack(logits, axis=1) if self.num_tasks > 1 else logits[0]
        return self._with_first_order(joined, dense_features, embeddings)

    @linen.nowrap
    def _mix(self, x: Array, experts: list[Array]) -> list[Array]:
        """Returns f^t [B, n] of each task."""
        if len(experts) == 1:
            return experts * self.num_tasks
        gates = nn.Dense(
            self.num_tasks * self.num_experts,
            recipe="f32",
            use_bias=False,
            name="gates",
        )(x)
        gates = gates.reshape(-1, self.num_tasks, self.num_experts)
        gates = jax.nn.softmax(gates)[..., None]  # [B, T, E, 1]
        mixed = []
        for task in range(self.num_tasks):
            weighted = [
                gates[:, task, i] * expert.astype(jnp.float32)
                for i, expert in enumerate(experts)
            ]
            mixed.append(sum(weighted[1:], weighted[0]).astype(self.compute_dtype))
        return mixed

    @linen.nowrap
    def _logit(self, task: int, mixed: Array, train: bool) -> Float[Array, "B"]:
        tower = self._mlp(
            f"tower_{task}", self.tower_mlp, dropout_rate=self.dropout_rate
        )
        init = self.head_init
        head = nn.Dense(1, recipe="f32", kernel_init=init, name=f"head_{task}")
        return head(tower(mixed, train=train))[:, 0]
