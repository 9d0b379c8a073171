"""Golden cases of kinds that are missing from the public vectors, computed by slow oracles in plain tensors."""

import json
import math

import numpy as np
import pytest
import torch

from tests.golden.runner import run_case

EXACT = {"rtol": 0.0, "atol": 0.0}


@pytest.fixture
def passes(tmp_path):
    def check(encoding, config, tolerance, **arrays):
        meta = {"encoding": encoding, "config": config, "tolerance": tolerance}
        path = tmp_path / f"{encoding}__variant.npz"
        plain = {
            name.replace("__", "."): np.asarray(torch.as_tensor(a).detach()) for name, a in arrays.items()
        }
        np.savez(path, meta=np.array(json.dumps(meta)), **plain)
        result = run_case(path)
        assert result.status == "PASS", str(result)

    return check


@pytest.mark.parametrize("ratio", [2, 2.0])
def test_irpe_ratios_may_be_whole_numbers(passes, ratio):
    offsets = torch.tensor([-40, -3, -2, 0, 2, 3, 5, 16])
    result = torch.tensor([-4, -2, -2, 0, 2, 2, 3, 4])  # 2 + 2 ln(x / 2) / ln 8, rounded, at most 4
    rule = {"ratios": [ratio], "alpha": "1*ratio", "beta": "2*ratio", "gamma": "8*ratio"}
    name = str(ratio).replace(".", "p")
    arrays = {f"out__int_{name}": result, f"out__float_{name}": result}
    passes("irpe", rule, EXACT, in__x_int=offsets, in__x_float=offsets.float(), **arrays)


def test_irpe_bias_has_no_gradient_of_its_input(passes):
    config = {"height": 1, "width": 3, "skip": 0, "method": "euc", "mode": "bias", "transposed": True}
    config |= {"shared_head": False, "num_heads": 2, "head_dim": 4, "ratio": 2.0, "rpe_on": "q", "seed": 0}
    table, cotangent = torch.randn(2, 9), torch.randn(1, 2, 3, 3)
    ids = (torch.arange(3)[:, None] - torch.arange(3)).abs() + 4
    grad = torch.zeros(2, 9)
    for i in range(3):
        for j in range(3):
            grad[:, ids[i, j]] += cotangent[0, :, i, j]
    passes(
        "irpe",
        config,
        {"rtol": 1e-5, "atol": 1e-6},
        in__x=torch.randn(1, 2, 3, 4),
        in__cotangent=cotangent,
        param__lookup_table_bias=table,
        out__y=table[:, ids][None],
        out__grad__x=torch.zeros(1, 2, 3, 4),
        out__grad__lookup_table_bias=grad,
    )


@pytest.mark.parametrize("listed", ["circles", "coordinates", "nothing"])
def test_gta_of_camera_poses_only(passes, listed):
    """Without so2 channels, coordinates may be missing or unused."""
    b, h, n, views, width = 1, 2, 6, 3, 8
    pose = torch.eye(4, dtype=torch.float64).repeat(b, views, 1, 1)
    pose[..., :3, :3] = torch.linalg.qr(torch.randn(b, views, 3, 3, dtype=torch.float64))[0]
    pose[..., :3, 3] = torch.randn(b, views, 3)
    factor = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    column = torch.zeros(4, 4, dtype=torch.float64)
    column[:3, 3] = 1
    each = [m * (1 - column + factor * column) for m in (pose, torch.linalg.inv(pose))]
    out_of, into = (m.repeat_interleave(n // views, 1) for m in each)
    q, k, v = (torch.randn(b, h, n, width, dtype=torch.float64, requires_grad=True) for _ in "qkv")

    def move(x, m):
        return torch.einsum("bnij,bhncj->bhnci", m, x.unflatten(-1, (-1, 4))).flatten(-2)

    rotated = move(q, out_of.mT), move(k, into), move(v, into)
    attn = (rotated[0] @ rotated[1].mT * width**-0.5).softmax(-1)
    y = move(attn @ rotated[2], out_of)
    cotangent = torch.randn_like(y)
    (y * cotangent).sum().backward()
    coord, freqs = torch.rand(b, n, 2), (0.25, 0.5, 1.0)
    angle = torch.stack(
        [2 * math.pi * f * m * coord[..., i] for f in freqs for i, m in enumerate((1, 3))], -1
    )
    circles = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
    config = {"f_dims": {"triv": 0, "se3": width}, "views": views, "grid_hw": [1, 2], "v_transform": True}
    extra = {}
    if listed != "nothing":
        extra["in__coord"] = coord
        config |= {"so2_freqs": 3, "max_freqs": [1, 3], "shared_freqs": False}
    if listed == "circles":
        extra["out__so2_mats"] = circles
    passes(
        "gta",
        config,
        {"rtol": 1e-4, "atol": 1e-5},
        in__extrinsic=pose,
        in__q=q,
        in__k=k,
        in__v=v,
        in__cotangent=cotangent,
        param__trans_coeff=factor.detach(),
        out__q_t=rotated[0],
        out__k_t=rotated[1],
        out__v_t=rotated[2],
        out__attn=attn,
        out__y=y,
        out__grad__q=q.grad,
        out__grad__trans_coeff=factor.grad,
        **extra,
    )


@pytest.mark.parametrize("block", [32, 64, 10])
def test_liere_of_large_blocks_rounds_as_float32_does(passes, block):
    shape, heads, blocks = (3, 4), 2, 64 // block
    torch.manual_seed(0)
    raw = (torch.rand(2, 1, blocks, block, block) * 2 * math.pi).requires_grad_()
    positions = torch.cartesian_prod(*(torch.linspace(0, 1, n) for n in shape))[None]
    upper = raw.triu(1) - 0.5
    generators = (positions[..., None, None, None] * (upper - upper.mT)[:, 0]).sum(2)
    matrices = torch.matrix_exp(generators)
    q, k = (torch.randn(1, heads, 12, 64, requires_grad=True) for _ in "qk")

    def rotate(x):
        used = x[..., : blocks * block].unflatten(-1, (blocks, block))
        return torch.cat(
            [torch.einsum("bnmij,bhnmj->bhnmi", matrices, used).flatten(-2), x[..., blocks * block :]], -1
        )

    result, cotangents = [rotate(q), rotate(k)], torch.randn(2, 1, heads, 12, 64)
    (torch.stack(result) * cotangents).sum().backward()
    config = {"grid": list(shape), "generator_dim": block, "per_head": False, "class_token": False}
    passes(
        "liere",
        {**config, "heads": heads, "head_dim": 64, "seed": 0},
        {"rtol": 3e-4, "atol": 3e-5},
        in__positions=positions,
        in__q=q,
        in__k=k,
        in__cotangent_q=cotangents[0],
        in__cotangent_k=cotangents[1],
        param__generator_raw_params=raw,
        out__rotation=matrices[:, :, None],
        out__q_rot=result[0],
        out__k_rot=result[1],
        out__grad__generator_raw_params=raw.grad,
        out__grad__q=q.grad,
        out__grad__k=k.grad,
    )


def test_comrope_gradients_of_all_projections(passes):
    torch.manual_seed(0)
    heads, head, block, axes, n = 2, 6, 3, 3, 9
    dim, blocks = heads * head, head // block
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    weights = {f"{m}.weight": torch.randn(dim, dim) / dim**0.5 for m in names}
    weights |= {f"{m}.bias": torch.randn(dim) for m in names}
    weights |= {
        "freqs": torch.randn(heads, 1, blocks, block, block),
        "multiplier": torch.randn(1, axes, blocks, 1, 1),
    }
    for p in weights.values():
        p.requires_grad_()
    x, positions = torch.randn(2, n, dim, requires_grad=True), torch.rand(2, n, axes, requires_grad=True)
    generators = (weights["freqs"] - weights["freqs"].mT) * weights["multiplier"]
    matrices = torch.matrix_exp(torch.einsum("bna,hamij->bnhmij", positions, generators))

    def part(name):
        return (x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]).unflatten(-1, (heads, head))

    def rotate(t):
        return torch.einsum("bnhmij,bnhmj->bhnmi", matrices, t.unflatten(-1, (blocks, block))).flatten(-2)

    q, k = rotate(part("q_proj") * head**-0.5), rotate(part("k_proj"))
    attn = (q @ k.mT).softmax(-1)
    y = (attn @ part("v_proj").transpose(1, 2)).transpose(1, 2).flatten(2)
    y = y @ weights["out_proj.weight"].T + weights["out_proj.bias"]
    cotangent = torch.randn_like(y)
    (y * cotangent).sum().backward()
    config = {"kind": "comrope-ld", "hidden": dim, "heads": heads, "head_dim": head, "block_size": block}
    config |= {
        "num_axes": axes,
        "grid": [2, 2, 2],
        "class_token": True,
        "q_scale": head**-0.5,
        "init_std": 0.5,
    }
    arrays = {f"param__{name.replace('.', '__')}": p for name, p in weights.items()}
    arrays |= {f"out__grad__{name.replace('.', '__')}": p.grad for name, p in weights.items()}
    arrays |= {"in__x": x, "in__positions": positions, "in__cotangent": cotangent}
    arrays |= {
        "out__exponent_matrix": generators,
        "out__rotation_blocks": matrices,
        "out__q_rot": q,
        "out__k_rot": k,
    }
    arrays |= {"out__attn": attn, "out__y": y, "out__grad__x": x.grad, "out__grad__positions": positions.grad}
    passes("comrope", config, {"rtol": 2e-4, "atol": 2e-5}, **arrays)


@pytest.mark.parametrize("method", ["yarn", "longrope"])
def test_tables_of_far_positions_agree_to_the_last_digits(passes, method):
    """Frequencies that differ in the last bit rotate far positions by visibly different angles."""
    dim, base, scale, trained = 32, 10000, 3, 2048
    power = torch.pow(float(base), torch.arange(0, dim, 2).float() / dim)
    pos = torch.tensor([0, 1, 100, 6143])
    if method == "yarn":
        low, high = (dim * math.log(trained / (2 * math.pi * r)) / (2 * math.log(base)) for r in (32, 1))
        low, high = math.floor(low), math.ceil(high)
        blend = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
        freqs = 1.0 / (scale * power) * (1 - (1 - blend)) + 1.0 / power * (1 - blend)
        config = {"scale": scale, "finetuned": False, "original_max_position_embeddings": trained}
        arguments, factor = {"out__low_high": torch.tensor([low, high])}, 0.1 * math.log(scale) + 1
    else:
        factors = torch.linspace(1.1, 3.9, dim // 2)
        freqs, factor = 1.0 / (factors * power), math.sqrt(1 + math.log(scale) / math.log(trained))
        config = {"policy": "su", "max_position_embeddings": scale * trained, "scale": 1.0}
        config["original_max_position_embeddings"] = trained
        arguments = {"param__rescale_factors": factors}
    angle = torch.cat([pos[:, None].float() * freqs] * 2, -1)
    passes(
        "rope_freqs",
        {"method": method, "dim": dim, "base": base, **config},
        {"rtol": 1e-5, "atol": 1e-6},
        in__pos=pos,
        out__inv_freq=freqs,
        out__mscale=factor,
        out__cos=angle.cos() * factor,
        out__sin=angle.sin() * factor,
        **arguments,
    )
