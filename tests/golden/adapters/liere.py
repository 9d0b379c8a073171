"""Golden cases of LieRE: rotations and rotated queries and keys, with gradients.

They run in float32, as the method takes its exponentials: the rounding of an exponential of a large matrix is nearly
the same wherever it is computed in float32, and for blocks of 32 and more it is what a comparison with float64 sees.
"""

import math

import torch
from torch import nn

import vispe


def run(case):
    case.ignore("seed", "how the case was made")
    heads, width = case.config("heads"), case.config("head_dim")
    grid, cls = case.config("grid"), int(case.config("class_token"))
    positions = case.input("positions").float()
    if positions.shape[1] != math.prod(grid) or positions.shape[2] != len(grid):
        raise ValueError("the positions are not those of the grid")
    encoding = vispe.create_encoding(
        "liere",
        dim=heads * width,
        num_heads=heads,
        axes=len(grid),
        block=case.config("generator_dim"),
        per_head=case.config("per_head"),
        normalize="none",
    )
    holder = nn.Module()
    holder.pos_enc = encoding
    weights = {"generator_raw_params": case.param("generator_raw_params")}
    encoding.rename_checkpoint_keys(weights, "", "pos_enc.")
    holder.load_state_dict(weights)
    coords = torch.cat([positions.new_zeros(len(positions), cls, len(grid)), positions], 1)
    spatial = torch.ones(coords.shape[:2], dtype=torch.bool)
    spatial[:, :cls] = False
    pos = vispe.Positions(coords, spatial)
    q, k = (case.input(name).float().requires_grad_() for name in ("q", "k"))
    transform = encoding.transform(pos, 0)
    q_rot, k_rot = transform.query(q), transform.key(k)
    has_grad = case.backward(cotangent_q=q_rot, cotangent_k=k_rot)
    rotation = encoding.rotations(pos)  # (1, h or 1, n, blocks, s, s)
    rotation = rotation.transpose(1, 2).flatten(2, 3)[:, :, None]
    result = {"rotation": rotation, "q_rot": q_rot, "k_rot": k_rot, "grad.q": q.grad, "grad.k": k.grad}
    if has_grad:
        raw = torch.zeros_like(case.param("generator_raw_params")).float()
        row, col = torch.triu_indices(encoding.width, encoding.width, 1)
        raw[:, 0, :, row, col] = encoding.skew.grad.transpose(0, 1).flatten(1, 2)
        result["grad.generator_raw_params"] = raw
    yield "transform", {name: value for name, value in result.items() if name in case.output_names}
