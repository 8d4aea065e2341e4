"""Images on disk, packed once into a memory-mapped array, and the loaders that feed them to a training step.

Only ``draws`` and ``loader`` import torch; the rest serves processes that never train.
"""
