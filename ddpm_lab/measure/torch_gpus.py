"""What torch can do with the GPUs that this process sees, as a line of JSON: run by ``hardware.ask_torch``.

It is a process of its own, because asking loads torch and wakes CUDA.
"""

import json
from typing import Any

import torch


def card(number: int) -> tuple[str, int, int, str]:
    """A GPU's name and compute capability, and the error of a first kernel on it; empty where it runs."""
    error = ""
    try:
        (torch.ones(1, device=f"cuda:{number}") + 1).item()
    except RuntimeError as failed:
        error = str(failed).partition("\n")[0]
    return (torch.cuda.get_device_name(number), *torch.cuda.get_device_capability(number), error)


def main() -> None:
    """Print the version and the error of CUDA, the architectures that torch has kernels for, and the GPUs."""
    told: dict[str, Any] = {"cuda": torch.version.cuda, "error": "", "architectures": [], "cards": []}
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        told["architectures"] = torch.cuda.get_arch_list()
        told["cards"] = [card(number) for number in range(torch.cuda.device_count())]
    except (AssertionError, RuntimeError) as failed:  # the first from a torch without CUDA
        told["error"] = str(failed)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
