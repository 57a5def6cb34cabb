"""What LoKA Probe learns and measures, as pure functions of arrays."""
