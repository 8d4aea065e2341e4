"""A diffusers U-Net trained to remove noise: ddpm-lab run torch_compile --workload examples.diffusion:make."""

from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch import Tensor
from torch.nn.functional import mse_loss
from torchvision import datasets, transforms

from ddpm_lab.workload import Training


def make() -> Training:
    """Yours would read files: datasets.ImageFolder(folder, transform=...)."""
    model = UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    scheduler = DDPMScheduler(1_000)
    data = datasets.FakeData(5_000, (3, 32, 32), 10, transforms.ToTensor())

    def loss(model: Any, batch: Any) -> Tensor:
        images = 2 * batch[0] - 1
        noise = torch.randn_like(images)
        t = torch.randint(0, 1_000, (len(images),), device=images.device)
        noisy = scheduler.add_noise(images, noise, t)
        return mse_loss(model(noisy, t, return_dict=False)[0].float(), noise)

    return Training(model=model, data=data, loss=loss, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4))
