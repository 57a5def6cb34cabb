"""The processes of a run: what they agree on, and the signals and hangs that end it."""
