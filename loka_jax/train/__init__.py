"""Training: a step, the loop around it, and all that a run needs.

config, model, planning, build     from options to compiled programs
state, gradients, step             a step as pure functions
metrics, tasks                     NE, AUC and calibration, by label column
loop, next_day, session, summary   steps in a row; a whole run, and its end

tables       options of embedding tables, lookups, stacks of tables of one dim
mesh         several devices: what lies where, routing, sums and averages
planner      what a mesh takes of memory, wire and time
processes    several processes, signals, the watchdog
checkpoints  saving, verifying, restoring
watch        divergence, outliers, drift, and what is done about them
logs         console, metrics, time, memory, profiles
folder       the files of a run: record, configuration, scores, lock
"""
