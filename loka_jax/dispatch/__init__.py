"""The fastest kernels that are accurate enough, per site and per GEMM.

candidates  what can run at a site, and why others cannot
table       what was measured of them on a device: times, errors, failures
policy      limits on errors, and who is fastest within them
plan        what was decided for a model, site by site
"""
