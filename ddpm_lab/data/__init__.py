"""Images on disk, packed once into a memory-mapped array, and the loaders that feed them to a training step.

Read ``packed``, ``draws`` and ``loaders`` first. Only ``draws``, ``pixels`` and ``loaders`` import torch; the rest
serves processes that never train.
"""
