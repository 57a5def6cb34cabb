"""Errors and times of functions, and of the sites of a model.

intervals    means over draws with their 95 % intervals
reference    the float32 equations of a site
compiling    many programs at a time
timing       kernel times by the profiler, wall clock of queues
site_errors  errors of each role of a site, in every recipe
programs     training and inference of a site, as functions that are timed
site_times   times of a site, in every recipe
checking     is a candidate right? `check_operands`, `check_casts`, `check_reference`,
             `check_scores`: what it runs on, is compared with, and may differ by
"""
