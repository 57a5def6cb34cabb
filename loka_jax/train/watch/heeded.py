"""What a run does when Probe's monitors raise alarms: `LoopConfig.on_alarm`."""

import dataclasses
from collections.abc import Callable, Mapping

from loka_jax.train.build import Run
from loka_jax.train.watch import replan
from loka_jax.train.watch.alarm import Seen
from loka_jax.train.watch.guard import TrainingFailed
from loka_jax.train.watch.host_state import Progress
from loka_jax.train.watch.replan import Change

# Times that learning rates are halved; monitors that stay beyond their thresholds then
# have another cause.
_MAX_LOWERED = 3


def heeded(
    run: Run, progress: Progress, seen: Mapping[str, Seen], say: Callable[[str], None]
) -> Change | None:
    """Returns what follows new alarms, which are said; None without.

    The plan is the run's, unless sites are demoted.

    Raises:
        TrainingFailed: if the run is to stop.
    """
    before, action = progress.alarms, run.config.loop.on_alarm
    alarms = before.after(progress.step, seen)
    new = alarms.warnings[len(before.warnings) :]
    if not new:
        return None
    if action == "stop":
        raise TrainingFailed(
            f"training was stopped by an alarm (--loop.on-alarm stop): {new[0]}"
        )
    for sentence in new:
        say(sentence)
    if action == "slow" and alarms.lowered < _MAX_LOWERED:
        alarms = dataclasses.replace(alarms, lowered=alarms.lowered + 1)
        lr_scale = progress.plateau.lr_scale / 2
        plateau = dataclasses.replace(progress.plateau, lr_scale=lr_scale)
        progress = dataclasses.replace(progress, plateau=plateau)
        say(f"step {progress.step:,}: learning rates are halved.")
    progress = dataclasses.replace(progress, alarms=alarms)
    if action == "demote":
        return replan.after_alarms(run, progress, alarms.sites_since(before))
    return Change(run.plan, (), progress)
