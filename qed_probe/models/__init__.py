"""Native models: configuration, layers, language model, checkpoints, tokenizer, and capture of what a memory does."""
