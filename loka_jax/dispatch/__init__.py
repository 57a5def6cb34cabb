"""The fastest kernels that are accurate enough, per site and per GEMM.

adopt       all of this for a model and a loop of one's own
candidates  the choices that can run at a site
table       their measurements on a device: times, errors, failures
local       the measurements that hold on this machine
performance the times of all candidates, measured or predicted: `work`, `regression`
policy      limits on errors, and the fastest choice within them
chains      the fastest choices of sites that hand FP8 on
plan        the choices for a model, site by site
drift       whether operands are still what they were, while training
tuning      measures the sites of a model; `measuring` one site, in worker processes
at_start    measures what may matter, within a budget
first_use   checks what a plan chose, before it runs
review      a plan by live errors; `learned` keeps them
printing    tables of sites and plans; `outlook` the last line, and if FP8 pays
"""
