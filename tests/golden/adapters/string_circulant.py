"""Golden cases of circulant STRING: rotated queries and keys, their products, and gradients.

Of the coefficients c of a case, only the differences of c[m] and c[s - m] have an effect, which are ours.
"""

import math

import torch

import vispe


def run(case):
    heads, width, grid = case.config("H"), case.config("D"), case.config("grid")
    size, positions = case.config("block"), case.input("pos").double()
    if case.input("q").shape != (case.config("B"), heads, math.prod(grid), width):
        raise ValueError("the tokens are not those of the configuration")
    encoding = vispe.create_encoding(
        "string", dim=heads * width, num_heads=heads, axes=len(grid), block=size
    ).double()
    coeffs = case.param("coeffs").double()
    count = (size - 1) // 2
    encoding.load_state_dict({"odd": coeffs[..., 1 : count + 1] - coeffs[..., size - count :].flip(-1)})
    of_grid = vispe.Grid(tuple(grid)).positions()
    routes = {"positions": vispe.Positions(positions)}
    if torch.equal(of_grid.coords[0].double(), positions):
        routes["grid"] = of_grid
    for route, pos in routes.items():
        encoding.zero_grad()
        q, k = (case.input(name).double().requires_grad_() for name in "qk")
        transform = encoding.transform(pos, 0)
        result = {"q_rot": transform.query(q), "k_rot": transform.key(k)}
        result["scores"] = result["q_rot"] @ result["k_rot"].transpose(-1, -2)
        if case.backward(cotangent=result["scores"]):
            grad_coeffs = torch.zeros_like(coeffs)
            grad_coeffs[..., 1 : count + 1] = encoding.odd.grad
            grad_coeffs[..., size - count :] = -encoding.odd.grad.flip(-1)
            result |= {"grad.q": q.grad, "grad.k": k.grad, "grad.coeffs": grad_coeffs}
        yield route, {name: value for name, value in result.items() if name in case.output_names}
