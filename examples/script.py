"""A plain training script: ddpm-lab compare "python examples/script.py" "python examples/script.py --channels-last"."""

import argparse

import torch
from torch import nn
from torch.nn.functional import mse_loss

parser = argparse.ArgumentParser()
parser.add_argument("--channels-last", action="store_true")
parser.add_argument("--steps", type=int, default=100_000)
options = parser.parse_args()

layout = torch.channels_last if options.channels_last else torch.contiguous_format
model = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1),
    *(nn.Sequential(nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 64, 3, padding=1)) for _ in range(4)),
    nn.Conv2d(64, 3, 3, padding=1),
).to(memory_format=layout)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(options.steps):
    images = torch.rand(8, 3, 32, 32)  # yours would come from a DataLoader
    noise = torch.randn_like(images)
    share = torch.rand(8, 1, 1, 1)
    noisy = (1 - share).sqrt() * images + share.sqrt() * noise
    loss = mse_loss(model(noisy.to(memory_format=layout)), noise)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
