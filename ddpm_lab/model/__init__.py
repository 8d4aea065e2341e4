"""What is trained: the U-Net, the diffusion process, the samplers and the training step."""
