"""Golden cases of HARoPE: the basis of axial RoPE, its rotation, unscaled scores, folded projections, and gradients."""

import torch

import vispe
from tests.golden.adapters._rotated import rotated
from vispe.encodings.parts.rotary.head_basis import fold_rows


def run(case):
    case.ignore("seed", "how the case was made")
    heads, width, grid = case.config("num_heads"), case.config("head_dim"), tuple(case.config("grid"))
    pos = vispe.Grid(grid, prefix=case.config("prefix_tokens", 0)).positions()
    encoding = vispe.create_encoding(
        "rope_axial",
        dim=heads * width,
        num_heads=heads,
        temperature=case.config("theta"),
        indexing="ij",
        layout=case.config("layout"),
        split=(width // (2 * len(grid)),) * len(grid),
        basis="head",
        basis_key=case.config("key"),
    ).double()
    weights = {name: case.param(name).double() for name in ("u", "v", "sigma")}
    if case.config("initial", False):
        for name, start in encoding.head_basis.named_parameters():
            case.agree(f"the initial values of {name}", start, weights[name])
    encoding.head_basis.load_state_dict(weights)
    if case.input("q").shape != (case.config("batch", 1), heads, pos.tokens, width):
        raise ValueError("the tokens are not those of the configuration")
    of_queries, of_keys = encoding.head_basis.matrices()
    result = {"matrix": of_queries, "matrix_inverse_transposed": torch.linalg.inv(of_queries).mT}
    if case.config("key") == "inverse_transpose":
        result["matrix_inverse_transposed"] = of_keys
    for name, matrices in (("q", of_queries), ("k", of_keys)):
        if f"weight_{name}" in case.inputs:
            result[f"folded_{name}"] = fold_rows(case.input(f"weight_{name}"), matrices.detach())
    yield "matrices", {name: value for name, value in result.items() if name in case.output_names}
    for route, positions in (
        ("grid", pos),
        ("coordinates", vispe.Positions(pos.coords.double(), pos.spatial)),
    ):
        encoding.zero_grad()
        outputs = rotated(case, encoding.transform(positions, 0), torch.float64)
        if "grad.q" in outputs:
            outputs |= {f"grad.{n}": p.grad for n, p in encoding.head_basis.named_parameters()}
        yield route, {name: value for name, value in outputs.items() if name in case.output_names}
