"""See what happens inside the memory of delta-rule linear attention."""
