"""Training of a converted model on two gloo processes, started by `test_distributed.py`; saves the results."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import vispe
from tests.hosts.helpers import image, tiny

SPEC = "alibi2d(slopes=learned)+learned"


def model(spec: str = SPEC, **options):
    return vispe.convert(tiny(dynamic_img_size=True, **options), spec).train()


def gradients(ours, x) -> dict:
    ours(x).square().sum(1).mean().backward()
    result = {n.removeprefix("module."): p.grad for n, p in ours.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g.clone() for n, g in result.items()}


def sharded(ours, policy):
    mesh = init_device_mesh("cpu", (2,))
    for module in (*ours.blocks, ours):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return ours


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mine = slice(2 * rank, 2 * rank + 2)
    x, wide = image(4, 3, 32, 24)[mine], image(4, 3, 8, 8 * 300)[mine]
    result = {}
    for way in ("ddp", "ddp checkpointed"):
        ours = model()
        ours.set_grad_checkpointing("checkpointed" in way)
        result[way] = gradients(DistributedDataParallel(ours), x)
    ours = sharded(model(), MixedPrecisionPolicy())
    result["fsdp out"] = ours(x).detach()
    result["fsdp"] = gradients(ours, x)
    ours, recorded = (
        sharded(model("alibi2d.local", img_size=(8, 8 * 300)), MixedPrecisionPolicy(torch.bfloat16)),
        [],
    )
    for block in ours.blocks:
        block.attn.register_forward_pre_hook(
            lambda _, args, named: recorded.append(str(named["attn_mask"].positions.coords.dtype)),
            with_kwargs=True,
        )
    result["fsdp bf16 out"], result["fsdp bf16 coordinates"] = ours(wide).detach(), recorded
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
