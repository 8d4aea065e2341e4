"""Which settings train a diffusion model fastest on this machine, and do they cost quality?"""

__version__ = "0.1.0"
