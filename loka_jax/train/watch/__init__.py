"""What is noticed while a run trains, and what is done about it.

guard, verdict          a loss that diverges, and whether the run goes on
looks, scale_watch      outliers among the operands of FP8 sites
drift_looks             operands that are no longer what the plan was made for
replan, restore         another plan; the state of a checkpoint
host_state              what of all that is saved with a checkpoint
operands                the scales and amaxes of a step
"""
