"""Golden cases of 2D ALiBi and iRPE, and tables of timm's models, through the fused kernels in float32.

`test_interpreter` runs this file.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.models import beit, swin_transformer
from torch import nn

import vispe
from tests.golden.adapters import irpe
from tests.golden.case import Case

VECTORS = Path(__file__).parents[2] / "golden/vectors"
FILES = sorted(VECTORS.glob("alibi2d__attn*.npz"))
SLOPES = {"constant": "constant", "fixed": "geometric", "learned": "learned"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_alibi2d(path):
    file = np.load(path)
    meta = json.loads(str(file["meta"]))
    config = meta["config"]
    assert not config["qk_norm"], "this layer has no norm"
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
    names = [name for name in layer.state_dict() if name.startswith("pos_enc.")]
    layer.load_state_dict(weights | {name: arrays["param.m"].flatten() for name in names})
    prefix = config["n_reg_tokens"] + config["add_cls"]
    x = arrays["in.x"].requires_grad_()
    y = layer(x, vispe.Grid((config["n_tokens_h"], config["n_tokens_w"]), prefix))
    y.backward(arrays["in.cotangent"])
    actual = {"y": y, "grad.x": x.grad, **{f"grad.{n}": p.grad for n, p in layer.named_parameters()}}
    if names:
        actual["grad.m"] = actual.pop(f"grad.{names[0]}").reshape(arrays["param.m"].shape)
    compared = 0
    for name, ours in actual.items():
        if f"out.{name}" in arrays:
            expected = arrays[f"out.{name}"]
            assert (ours - expected).norm() <= meta["tolerance"]["rtol"] * expected.norm() + 1e-4
            compared += 1
    assert compared >= 5


def test_irpe_bias_mode():
    """The case has a bias and its gradients; attention weights, read by one-hot values, show both."""
    case = Case(VECTORS / "irpe__bias_cross_perhead_k_skip0_4x3.npz")
    grid, heads = irpe._grid(case), case.config("num_heads")
    encoding = vispe.create_encoding(
        irpe._spec(case), dim=heads * case.config("head_dim"), num_heads=heads
    )  # fmt: skip
    encoding.load_state_dict({f"rpe_k.{name}": case.param(name) for name in case.params})
    n = grid.tokens
    q, values = torch.zeros(1, heads, n, 16), torch.eye(n).expand(1, heads, n, n)
    weight = vispe.attention(q, q, values, bias=encoding.bias(grid.positions(), 0), backend="triton")
    expected = torch.from_numpy(case.outputs["y"]).double().softmax(-1)
    torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-6)
    cotangent = case.input("cotangent")
    # gives the cotangent less its row sums, spread by the weights
    weight.backward(cotangent / weight.detach())
    expanded = expected.float() * cotangent.sum(-1, keepdim=True)
    dense = encoding.bias(grid.positions(), 0).dense()
    grads = torch.autograd.grad(dense, list(encoding.parameters()), expanded)
    for (name, parameter), more in zip(encoding.named_parameters(), grads, strict=True):
        golden = torch.from_numpy(case.outputs[f"grad.{name.removeprefix('rpe_k.')}"])
        torch.testing.assert_close(parameter.grad + more, golden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["rpb.swin", "rpb.beit"])
def test_tables_of_timm(name):
    window, table = (3, 5), "relative_position_bias_table"
    if name == "rpb.swin":
        stock = swin_transformer.WindowAttention(24, 3, window_size=window, qkv_bias=False)
    else:
        stock = beit.Attention(24, 3, window_size=window)
    nn.init.normal_(getattr(stock, table))
    ours = vispe.Attention(
        24, 3, vispe.create_encoding(name, num_heads=3, grid=window), qkv_bias=False, backend="triton"
    )  # fmt: skip
    state = {n.replace(table, f"pos_enc.{table}"): p.detach() for n, p in stock.named_parameters()}
    ours.load_state_dict(state)
    grid = vispe.Grid(window, int(name == "rpb.beit"))
    x = torch.randn(2, grid.tokens, 24, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    actual, expected = ours(x, grid), stock.double()(wide)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    cotangent = torch.randn_like(actual)
    actual.backward(cotangent)
    expected.backward(cotangent.double())
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)
    grads = {n.replace(table, f"pos_enc.{table}"): p.grad for n, p in stock.named_parameters()}
    for key, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), grads[key], rtol=1e-4, atol=1e-5)
