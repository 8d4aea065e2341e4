"""What torch makes of the GPUs that this process sees, as a line of JSON: run by ``gpu_trouble``.

It is a process of its own, because asking loads torch and wakes CUDA.
"""

from __future__ import annotations

import json

import torch


def main() -> None:
    """Print the error of CUDA, or else the architectures that torch has kernels for, and the GPUs."""
    cuda = torch.cuda
    error, cards = "", []
    try:
        cuda.init()  # type: ignore[no-untyped-call]
        count = cuda.device_count()
        cards = [(cuda.get_device_name(i), *cuda.get_device_capability(i)) for i in range(count)]
    except (AssertionError, RuntimeError) as failed:  # the first from a torch without CUDA
        error = str(failed)
    print(
        json.dumps(
            {
                "cuda": torch.version.cuda,
                "error": error,
                "architectures": [] if error else cuda.get_arch_list(),
                "cards": cards,
            }
        )
    )


if __name__ == "__main__":
    main()
