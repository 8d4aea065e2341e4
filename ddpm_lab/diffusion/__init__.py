"""What is trained: the DDPM, its U-Net in plain and in fused form, and the samplers, with their equations.

Read ``diffusion`` first (noise schedule and loss), then ``unet`` and ``blocks``; ``reference`` is the same network in
the plainest code. ``step`` has what every optimizer step needs; ``fused`` and ``convolution`` bind the C++ kernels.
"""
