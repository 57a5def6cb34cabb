"""LoKA Probe: statistics of sites' operands and draws from them, as pure functions."""
