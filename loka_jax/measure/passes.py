"""The passes of a candidate as it is used, as functions of arrays.

training    forward and backward: all gradients, and the next scaling state
prepare     what inference needs of the weights, computed once (`loka_jax.serving`)
inference   forward

The same functions are checked, timed and digested.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from loka_jax.fp8 import Fp8Array
from loka_jax.normed import NormVectors
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.products import Activations
from loka_jax.ops.run_site import SiteArrays, run_site
from loka_jax.scaling import DelayedScaling
from loka_jax.serving import fold
from loka_jax.site import SiteSpec

_ROTATED_BYTES = 120e6  # twice the L2 of an H200
_MAX_SETS = 16


class Inputs(NamedTuple):
    """What a pass takes, besides the gradient of its result."""

    lhs: Float[Array, "m k"]
    lhs_fp8: Fp8Array | None
    rhs: Float[Array, "k n"]
    vectors: NormVectors
    state: DelayedScaling | None

    def split(self) -> tuple["Inputs", tuple]:
        """Returns what is there before inference, and the rows."""
        return self._replace(lhs=None, lhs_fp8=None), (self.lhs, self.lhs_fp8)


class Trained(NamedTuple):
    """What the training pass returns.

    Attributes:
        results: by name: "y", "dlhs", "drhs" and so on.
        y_fp8: the activations in FP8, if these leave.
        state: the next delayed-scaling state, if there is one.
    """

    results: Mapping[str, Array]
    y_fp8: Fp8Array | None
    state: DelayedScaling | None


class Passes:
    """The passes of a candidate.

    `inference` is there once `prepare` was traced, which splits the program.
    """

    def __init__(self, plan: KernelPlan, epsilon: float):
        """Takes the plan of the candidate, and the summand of the variance."""
        self._plan, self._epsilon = plan, epsilon
        self._inference: Callable[..., Any] | None = None

    def forward(self, inputs: Inputs) -> Array | Activations:
        """Returns the activations."""
        lhs = inputs.lhs
        if inputs.lhs_fp8 is not None:
            lhs = Activations(inputs.lhs, inputs.lhs_fp8)
        arrays = SiteArrays(lhs, inputs.rhs, *inputs.vectors)
        return run_site(self._plan, arrays, inputs.state, epsilon=self._epsilon)

    def training(self, inputs: Inputs, g: Float[Array, "m n"]) -> Trained:
        """Returns the activations, all gradients, and the next state."""

        def forward(differentiated: Inputs):
            out = self.forward(differentiated._replace(lhs_fp8=inputs.lhs_fp8))
            return (out.y, out.fp8) if isinstance(out, Activations) else (out, None)

        differentiated = inputs._replace(lhs_fp8=None)
        y, pull, y_fp8 = jax.vjp(forward, differentiated, has_aux=True)
        (gradients,) = pull(g)
        results = {"y": y, "dlhs": gradients.lhs, "drhs": gradients.rhs}
        for name, gradient in gradients.vectors._asdict().items():
            if gradient is not None:
                results[f"d{name}"] = gradient
        return Trained(results, y_fp8, gradients.state)

    def prepare(self, weights: Inputs, *lhs: Any) -> list[Array]:
        """Returns what inference needs of the weights; of `lhs` only its types."""
        folded = fold(self._infer, weights, *lhs)
        self._inference = folded.function
        return folded.ready

    def inference(self, ready: list[Array], *lhs: Any) -> Array | Fp8Array:
        """Returns the activations, in FP8 if these leave."""
        assert self._inference is not None
        return self._inference(ready, *lhs)

    def _infer(self, weights: Inputs, lhs, lhs_fp8) -> Array | Fp8Array:
        out = self.forward(weights._replace(lhs=lhs, lhs_fp8=lhs_fp8))
        return out.fp8 if isinstance(out, Activations) else out


def num_rotated(spec: SiteSpec) -> int:
    """Returns the number of operand sets whose rotation keeps them out of the L2."""
    num_bytes = 2 * spec.m * (spec.k + spec.n)
    return min(max(2, round(_ROTATED_BYTES / num_bytes + 0.5)), _MAX_SETS)
