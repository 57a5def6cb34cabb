"""The folder of a run: what is written to it, under a lock, and what is read back."""
