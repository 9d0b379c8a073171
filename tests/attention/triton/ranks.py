"""Two gloo processes with the fused kernels in the interpreter; `check_operator` starts one, which forks the other."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import vispe

GRID = vispe.Grid((3, 4), 1)


def layer():
    """Return an attention layer with a learned table, the same in each process."""
    torch.manual_seed(0)
    table = vispe.create_encoding("rpb.beit(std=1)", num_heads=2, grid=GRID.shape)
    return vispe.Attention(16, 2, table, backend="triton")


def tokens():
    """Return one sample for each process."""
    return torch.randn(2, GRID.tokens, 16, generator=torch.Generator().manual_seed(1))


def gradients(module, x):
    module(x, GRID).square().mean().backward()
    return {name.removeprefix("module."): p.grad for name, p in module.named_parameters()}


def main(folder: str) -> None:
    child = os.fork()
    rank = int(child == 0)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    result = gradients(DistributedDataParallel(layer()), tokens()[rank : rank + 1])
    torch.save(result, f"{folder}/{rank}.pt")
    dist.barrier()
    if rank == 1:
        os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1])
