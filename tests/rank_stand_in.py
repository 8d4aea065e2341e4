"""What torchrun starts on every node until the lab's own ranks do: all meet, and the first one runs the command."""

import sys

import torch
import torch.distributed as dist

from ddpm_lab.__main__ import main

if __name__ == "__main__":
    dist.init_process_group("gloo")
    met = torch.ones(())
    dist.all_reduce(met)
    code = torch.tensor(main(sys.argv[1:]) if dist.get_rank() == 0 else 0)
    dist.broadcast(code, 0)
    print(f"rank {dist.get_rank()} met {int(met) - 1} other", flush=True)
    dist.destroy_process_group()
    sys.exit(int(code))
