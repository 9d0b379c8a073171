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
    actual = {"inv_freq": encoding.frequencies().float()}
    q, k = (case.input(name).double().requires_grad_() for name in "qk")
    if q.shape != (case.config("B"), heads, length, width):
        raise ValueError(f"q is {tuple(q.shape)}")
    transform = encoding.transform(vispe.Positions(torch.arange(length, dtype=torch.float64)[:, None]), 0)
    actual |= {"q_rot": transform.query(q), "k_rot": transform.key(k)}
    actual["scores"] = actual["q_rot"] @ actual["k_rot"].mT
    if case.backward(cotangent=actual["scores"]):
        actual |= {"grad.q": q.grad, "grad.k": k.grad}
        actual |= {f"grad.{name}": getattr(encoding, name).grad[0] for name in ("cos_coef", "sin_coef")}
    yield "transform", {name: value for name, value in actual.items() if name in case.output_names}
    grid = encoding.transform(vispe.Grid((length,)).positions(), 0)
    yield "grid", {"q_rot": grid.query(q), "k_rot": grid.key(k)}
    expected = (actual["scores"] * width**-0.5).softmax(-1) @ q
    for backend in ("reference", "sdpa"):
        case.agree(
            f"the output of {backend}",
            vispe.attention(q, k, q, transform=transform, backend=backend),
            expected,
        )
