"""Golden cases of 2D ALiBi through the fused kernels, in float32. `test_interpreter` runs this file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import vispe

FILES = sorted(Path(__file__).parents[1].glob("golden/vectors/alibi2d__attn*.npz"))
SLOPES = {"constant": "constant", "fixed": "geometric", "learned": "learned"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_alibi2d(path):
    file = np.load(path)
    meta = json.loads(str(file["meta"]))
    config = meta["config"]
    if config["qk_norm"] or config["slope_type"] not in SLOPES:
        pytest.skip("a case of the norm, which the runner has with other backends")
    arrays = {name: torch.from_numpy(file[name]).float() for name in file.files if name != "meta"}
    spec = {
        "name": "alibi2d", "slopes": SLOPES[config["slope_type"]], "metric": config["metric"],
        "wrap": config["wrap"], "normalize": "max" if config["normalize"] else "none",
    }  # fmt: skip
    layer = vispe.Attention(
        config["dim"], config["num_heads"], spec, qkv_bias=config["qkv_bias"], backend="triton"
    )
    weights = {
        n.removeprefix("param."): a for n, a in arrays.items() if n.startswith("param.") and n != "param.m"
    }
    own = [name for name in layer.state_dict() if name.startswith("pos_enc.")]
    layer.load_state_dict(weights | {name: arrays["param.m"].flatten() for name in own})
    prefix = config["n_reg_tokens"] + config["add_cls"]
    x = arrays["in.x"].requires_grad_()
    y = layer(x, vispe.Grid((config["n_tokens_h"], config["n_tokens_w"]), prefix))
    y.backward(arrays["in.cotangent"])
    found = {"y": y, "grad.x": x.grad, **{f"grad.{n}": p.grad for n, p in layer.named_parameters()}}
    if own:
        found["grad.m"] = found.pop(f"grad.{own[0]}").reshape(arrays["param.m"].shape)
    compared = 0
    for name, ours in found.items():
        if f"out.{name}" in arrays:
            wanted = arrays[f"out.{name}"]
            assert (ours - wanted).norm() <= meta["tolerance"]["rtol"] * wanted.norm() + 1e-4
            compared += 1
    assert compared >= 5
