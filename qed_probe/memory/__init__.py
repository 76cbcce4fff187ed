"""What a memory holds, and what reads of it contain: exact linear algebra on the inputs that layers fed their memories."""

from qed_probe.memory.run import memory, memory_store

__all__ = ["memory", "memory_store"]
