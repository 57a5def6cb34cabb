"""What a mesh of GPUs takes of memory, wire and time, before any of them is used."""
