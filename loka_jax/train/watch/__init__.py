"""What is noticed while a run trains, and what is done about it.

guard           a loss that diverges, and whether the run goes on
looks           looks at FP8 sites, and which of them are not yet read
scale_watch     outliers among their operands
replan          another plan
host_state      what of all that is saved with a checkpoint, and the way back to one
"""
