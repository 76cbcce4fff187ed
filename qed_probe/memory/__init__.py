"""What a memory holds, and what reads of it contain: exact linear algebra on the inputs that layers fed their memories."""

from qed_probe.memory.run import inspect_memory, inspect_memory_store, read_weights

__all__ = ["inspect_memory", "inspect_memory_store", "read_weights"]
