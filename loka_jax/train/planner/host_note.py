"""What a run may save whose host takes longer for a step than its GPUs."""

import dataclasses

from loka_jax.train.planner.mesh_plan import Rates, estimate
from loka_jax.train.planner.step_sizes import Mesh, Workload

_STEPS_PER_CALL = 8  # looks at scales end calls that are longer
_WORTH_S = 60.0  # they take tens of seconds to compile


def host_note(
    workload: Workload, mesh: Mesh, steps: int, rates: Rates | None = None
) -> str | None:
    """Returns a sentence on what several steps a call may save, None if that is little.

    Args:
        rates: of the host; None for those of `Rates`.
    """
    rates = rates or Rates()

    def seconds(workload: Workload) -> float:
        return 1e-6 * steps * estimate(workload, mesh, rates).step_us

    several = dataclasses.replace(workload, steps_per_call=_STEPS_PER_CALL)
    now, then = seconds(workload), seconds(several)
    if now - then < _WORTH_S:
        return None
    return (
        f"The host may take longer to launch a step than {mesh.gpus} GPUs to run it: "
        f"--loop.steps-per-call {_STEPS_PER_CALL} may save {now - then:,.0f} of "
        f"{now:,.0f} s."
    )
