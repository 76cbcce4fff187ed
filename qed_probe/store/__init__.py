"""The trace store: its schema, the writer that survives a kill, the reader that never passes a part for the whole."""
