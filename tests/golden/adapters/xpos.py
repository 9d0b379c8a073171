"""Golden cases of xPos of torchscale and x-transformers: rotated and scaled queries and keys, with gradients."""

import torch

import vispe

CENTRES = {"torchscale": "up", "x-transformers": "down"}


def run(case):
    heads, width, length = case.config("H"), case.config("D"), case.config("N")
    encoding = vispe.create_encoding(
        "xpos",
        dim=heads * width,
        num_heads=heads,
        causal=True,
        base=case.config("theta", 10000),
        scale_base=case.config("scale_base", 512),
        centre=CENTRES[case.config("variant")],
    )
    offset = case.config("offset", 0)
    if "pos" in case.inputs:
        positions = case.input("pos").double() + offset
        seq_len = positions.max() + 1
    else:  # the last tokens of a sequence that is longer by the offset
        positions = torch.arange(length, dtype=torch.float64) + offset
        seq_len = torch.tensor(float(length + offset), dtype=torch.float64)
    routes = {"coordinates": vispe.Positions(positions[:, None], extent=seq_len.reshape(1, 1))}
    if "pos" not in case.inputs:
        keep = torch.arange(offset, length + offset)[None]
        routes["grid"] = vispe.Grid((length + offset,)).positions().gather(keep)
    for route, pos in routes.items():
        q, k = (case.input(name).double().requires_grad_() for name in "qk")
        if q.shape != (case.config("B"), heads, length, width):
            raise ValueError(f"q is {tuple(q.shape)}")
        transform = encoding.transform(pos, 0)
        actual = {"q_rot": transform.query(q), "k_rot": transform.key(k)}
        actual["scores"] = actual["q_rot"] @ actual["k_rot"].mT
        if case.backward(cotangent=actual["scores"]):
            actual |= {"grad.q": q.grad, "grad.k": k.grad}
        yield route, {name: value for name, value in actual.items() if name in case.output_names}
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    expected = (actual["scores"] * width**-0.5).masked_fill(~mask, float("-inf")).softmax(-1) @ q
    for backend in ("reference", "sdpa"):
        out = vispe.attention(q, k, q, transform=transform, is_causal=True, backend=backend)
        case.agree(f"the output of {backend}", out, expected)
