"""Golden cases of RoPE++: real and imaginary scores, with gradients."""

import torch

import vispe

DOUBLED = ("imag1", "imag2")  # every query gives a real and an imaginary head


def run(case):
    mode, width, positions = case.config("mode"), case.config("D"), case.input("pos")
    inputs = {name: case.input(name).double() for name in "qk"}
    if inputs["q"].shape != (case.config("B"), case.config("H"), case.config("T"), width):
        raise ValueError(f"q is {tuple(inputs['q'].shape)}")
    times = 2 if mode in DOUBLED else 1
    heads = inputs["q"].shape[1] * times
    encoding = vispe.create_encoding(
        "rope_pp",
        dim=heads * width,
        num_heads=heads,
        base=case.config("base", 10000.0),
        mode={"imag2": "imag1"}.get(mode, mode),
    )
    pos = vispe.Positions(
        positions.double()[:, None] if positions.ndim == 1 else positions.double()[..., None]
    )
    # the angles are those of the frequencies of the case
    expected = positions.double()[..., None] * case.param("inv_freq").double()
    case.agree("the angles", encoding.angles(pos)[:, 0], expected.expand(1, *expected.shape[-2:]))
    q, k = (t.clone().requires_grad_() for t in inputs.values())
    transform = encoding.transform(pos, 0)
    actual = {"q_rot": transform.query(q.repeat_interleave(times, 1)), "k_rot": transform.key(k)}
    actual["scores"] = actual["q_rot"] @ actual["k_rot"].repeat_interleave(heads // k.shape[1], 1).mT
    if case.backward(cotangent=actual["scores"]):
        actual |= {"grad.q": q.grad, "grad.k": k.grad}
    yield "transform", {name: value for name, value in actual.items() if name in case.output_names}
    # attention of groups of query heads gives what these scores do
    v = torch.randn(k.shape, dtype=k.dtype, generator=torch.Generator().manual_seed(0))
    wide = v.repeat_interleave(heads // k.shape[1], 1)
    expected = (actual["scores"] * width**-0.5).softmax(-1) @ wide
    for backend in ("reference", "sdpa"):
        out = vispe.attention(
            q.repeat_interleave(times, 1), k, v, transform=transform, enable_gqa=True, backend=backend
        )
        case.agree(f"the output of {backend}", out, expected)
