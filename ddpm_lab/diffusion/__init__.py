"""What is trained: the DDPM, its U-Net in plain and in fused form, and the samplers, with their equations.

Read ``process`` first (noise schedule and loss), then ``unet`` and ``blocks``; ``reference`` is the same network in the
plainest code. ``step`` has what every optimizer step needs; ``kernels`` binds the C++ kernels.
"""
