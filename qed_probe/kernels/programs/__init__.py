"""Triton programs of the chunked recurrence, one module for each step: prepare, couple and invert, solve, scan, read."""
