"""The passes that are timed compute all that a training step computes at a site."""

import jax.numpy as jnp
import numpy as np

from loka_jax.measure.programs import arguments_of_draw, planned, programs_of
from loka_jax.site import Choice, SiteSpec
from tests.support import stand_ins

SPEC = SiteSpec(64, 32, 16, "layer", "swish", use_bias=True)


def _trained(choice):
    programs = programs_of(planned(SPEC, Choice.parse(choice), stand_ins.CPU))
    draw, begin = (programs.by_name[name].function for name in ("draw", "begin"))
    trial, _, inputs = begin(draw(*arguments_of_draw("ordinary", 0)))
    return programs.passes.training(inputs, trial.g), inputs, trial


def test_every_parameter_has_a_gradient():
    trained, *_ = _trained("xla bf16")
    names = {"y", "dlhs", "drhs", "dbias", "dgamma", "dbeta"}
    assert set(trained.results) == names and trained.state is None
    assert all(jnp.any(x != 0) for x in trained.results.values())


def test_the_next_state_holds_the_amaxes_of_this_step():
    trained, inputs, trial = _trained("xla fp8_tensorwise_delayed")
    newest = trained.state.amax_history[:, 0]
    found = [jnp.max(jnp.abs(x)) for x in (trial.lhs, trial.rhs)]
    np.testing.assert_array_equal(newest[:2], found)
    np.testing.assert_array_equal(
        trained.state.amax_history[:, 1:], inputs.state.amax_history[:, :-1]
    )


def test_inference_takes_the_prepared_weight_and_the_rows():
    programs = programs_of(
        planned(SPEC, Choice.parse("xla fp8_rowwise"), stand_ins.CPU)
    )
    arguments = programs.by_name["inference"].arguments
    sizes = [x.shape for x in arguments.leaves]
    assert (SPEC.m, SPEC.k) in sizes and (SPEC.m, SPEC.n) not in sizes
    eight_bit = [x for x in arguments.leaves if jnp.dtype(x.dtype).itemsize == 1]
    assert [x.size for x in eight_bit] == [SPEC.k * SPEC.n]
