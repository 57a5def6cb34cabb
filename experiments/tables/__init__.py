"""Tables of results in README and docs, made from the JSON of `experiments/results`."""
