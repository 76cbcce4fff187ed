"""Traces and outcomes on disk: schemas, a writer that survives a kill, readers that never pass a part for the whole."""
