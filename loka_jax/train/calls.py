"""How many steps the training loop takes by one call."""

from loka_jax.train.config import Config
from loka_jax.train.watch.scale_watch import LOOK_STEPS


def steps_at_once(config: Config, step: int, steps_per_epoch: int, end: int) -> int:
    """Returns the number of steps of the next call: `loop.steps_per_call` or 1.

    A call costs the host hundreds of microseconds, whatever it computes. What the loop
    does between steps (log lines, evaluations, looks, profiles) ends a call, so that
    runs do the same at the same steps, and steps that Probe observes are taken one by
    one.

    `step` have been taken, of `end`.
    """
    loop, traced = config.loop, config.run.profile_steps()
    count = loop.steps_per_call
    after = step + count
    if after > end:
        return 1
    every = (
        loop.log_every,
        loop.eval_every or steps_per_epoch,
        loop.save_every or after,
        config.probe.look_every or after,
        LOOK_STEPS,
    )
    is_interrupted = any(step // n != (after - 1) // n for n in every)
    is_observed = any(
        config.probe.config_at(s) is not None or s in traced for s in range(step, after)
    )
    return 1 if is_interrupted or is_observed else count
