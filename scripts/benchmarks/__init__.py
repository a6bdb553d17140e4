"""What `scripts/benchmark.py` measures, one module a command, and what they share."""
