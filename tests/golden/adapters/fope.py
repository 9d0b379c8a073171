"""Golden cases of FoPE: tables of mixed waves, their products, and gradients."""

import torch

import vispe


def run(case):
    heads, width, length = case.config("H"), case.config("D"), case.config("N")
    encoding = vispe.create_encoding(
        "fope",
        dim=heads * width,
        num_heads=heads,
        axes=1,
        base=case.config("theta", 10000.0),
        train_length=case.config("train_length"),
        norm=case.config("norm", False),
        trainable=True,
    ).double()
    encoding.load_state_dict({name: case.param(name)[None] for name in ("cos_coef", "sin_coef")})
    found = {"inv_freq": encoding.frequencies().float()}
    q, k = (case.input(name).double().requires_grad_() for name in "qk")
    if q.shape != (case.config("B"), heads, length, width):
        raise ValueError(f"q is {tuple(q.shape)}")
    turn = encoding.transform(vispe.Positions(torch.arange(length, dtype=torch.float64)[:, None]), 0)
    found |= {"q_rot": turn.query(q), "k_rot": turn.key(k)}
    found["scores"] = found["q_rot"] @ found["k_rot"].mT
    if case.backward(cotangent=found["scores"]):
        found |= {"grad.q": q.grad, "grad.k": k.grad}
        found |= {f"grad.{name}": getattr(encoding, name).grad[0] for name in ("cos_coef", "sin_coef")}
    yield "transform", {name: value for name, value in found.items() if name in case.output_names}
    grid = encoding.transform(vispe.Grid((length,)).positions(), 0)
    yield "grid", {"q_rot": grid.query(q), "k_rot": grid.key(k)}
    wanted = (found["scores"] * width**-0.5).softmax(-1) @ q
    for backend in ("reference", "sdpa"):
        case.agree(
            f"the output of {backend}", vispe.attention(q, k, q, transform=turn, backend=backend), wanted
        )
