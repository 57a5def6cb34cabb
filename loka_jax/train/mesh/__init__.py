"""Training over several devices: what lies where, and what travels between them."""
