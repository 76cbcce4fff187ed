"""Other people's models: which of their layers own a memory, and what they hand their kernels."""
