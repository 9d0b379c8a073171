"""Golden cases of PaPE: biases and unscaled scores with gradients, densely and as terms added to q . k."""

import torch

import vispe
from vispe.attention.backends import reference
from vispe.attention.call import Call


def run(case):
    x, q, k = (case.input(n).double().requires_grad_() for n in ("x", "q", "k"))
    batch, heads, width = case.config("B"), case.config("H"), case.config("D")
    if q.shape[:2] != (batch, heads) or q.shape[3] != width:
        raise ValueError("queries are not as the case says")
    coords, shape = case.input("pos"), case.config("grid")
    radial = case.config("variant") == "ri"
    encoding = vispe.create_encoding(
        "pape",
        dim=x.shape[-1],
        num_heads=heads,
        head_dim=width,
        axes=coords.shape[-1],
        form="radial" if radial else "projected",
        parabolas=case.config("parabolas"),
    )
    encoding.load_state_dict({name: case.param(name) for name in case.params})
    encoding.double()
    pos = vispe.Grid(shape).positions()
    case.agree("the positions", pos.coords[0], coords)
    for route, positions in (("grid", pos), ("free coordinates", vispe.Positions(coords.double()[None]))):
        for leaf in (x, q, k, *encoding.parameters()):
            leaf.grad = None
        bias = encoding.bias(positions, 0, x)
        scale = width**-0.5
        # the reference scales the bias together with the product of queries and keys
        scores = q @ k.mT + bias.dense() / scale
        case.backward(cotangent=scores)
        result = {"scores": scores, "bias": bias.dense() / scale}
        result |= {f"grad.{n}": t.grad for n, t in (("x", x), ("q", q), ("k", k))}
        result |= {f"grad.{n}": p.grad for n, p in encoding.named_parameters()}
        yield route, {name: value for name, value in result.items() if name in case.output_names}
    with torch.no_grad():
        weights = reference.weights(Call(q, k, q, encoding.bias(pos, 0, x)))
        case.agree("the weights", weights, (torch.from_numpy(case.outputs["scores"]) * scale).softmax(-1))
