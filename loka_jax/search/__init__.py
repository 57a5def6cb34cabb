"""The fastest configuration of a run, found by few trials and what they teach."""
