"""What the numbers in docs/benchmarks.md were printed by."""
