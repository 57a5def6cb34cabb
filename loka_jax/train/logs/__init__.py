"""What a run tells while it trains: console, metrics, time, memory, profiles."""
