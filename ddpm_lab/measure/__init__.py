"""Isolated groups of ranks that take turns: what runs, what it took, and what else the machine did meanwhile.

Read ``campaign`` first (which sets are missing, and when to stop), then ``sets`` and ``group`` (fresh processes in
turns) and ``rank`` (what one process does). ``code_version`` says which code was measured. Nothing here needs more
than torch, torchvision, numpy, psutil and Pillow.
"""
