"""Golden cases of PoPE: expanded queries and keys, their products, and gradients."""

import torch

import vispe


def run(case):
    heads, width, transformed = case.config("H"), case.config("D"), case.config("rotate_dim")
    split, shape, positions = case.config("axial_dims", None), case.config("grid", None), case.input("pos")
    # the reference counts axes from the last one
    coords = positions[:, None] if positions.ndim == 1 else positions.flip(-1)
    encoding = vispe.create_encoding(
        "pope",
        dim=heads * width,
        num_heads=heads,
        base=case.config("theta", 10000),
        rotated=transformed / width,
        split=None if split is None else split[::-1],
    )
    encoding.load_state_dict({"bias": case.param("bias")})
    encoding.double()
    routes = {"coordinates": vispe.Positions(coords.double())}
    if shape is not None:
        routes["grid"] = vispe.Grid(tuple(shape)).positions()
    for route, pos in routes.items():
        q, k = (case.input(name).double().requires_grad_() for name in "qk")
        if q.shape != (case.config("B"), heads, case.config("N"), width):
            raise ValueError(f"q is {tuple(q.shape)}")
        encoding.zero_grad()
        transform = encoding.transform(pos, 0)
        result = {"q_rot": transform.query(q), "k_rot": transform.key(k)}
        result["scores"] = result["q_rot"] @ result["k_rot"].mT
        if case.backward(cotangent=result["scores"]):
            result |= {"grad.q": q.grad, "grad.k": k.grad, "grad.bias": encoding.bias.grad}
        yield route, {name: value for name, value in result.items() if name in case.output_names}
    # backends take heads as wide as these
    q, k = case.input("q").double(), case.input("k").double()
    outs = [vispe.attention(q, k, q, transform=transform, backend=b) for b in ("reference", "sdpa")]
    case.agree("the outputs of the backends", *outs)
    weights = (result["scores"].detach() * width**-0.5).softmax(-1)
    case.agree("the output of attention and that of its scores", outs[0], torch.matmul(weights, q))
