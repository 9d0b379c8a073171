"""Golden cases of RoPE++: real and imaginary scores, with gradients."""

import torch

import vispe

DOUBLED = ("imag1", "imag2")  # every query gives a real and an imaginary head


def run(case):
    mode, width, places = case.config("mode"), case.config("D"), case.input("pos")
    given = {name: case.input(name).double() for name in "qk"}
    if given["q"].shape != (case.config("B"), case.config("H"), case.config("T"), width):
        raise ValueError(f"q is {tuple(given['q'].shape)}")
    times = 2 if mode in DOUBLED else 1
    heads = given["q"].shape[1] * times
    encoding = vispe.create_encoding(
        "rope_pp",
        dim=heads * width,
        num_heads=heads,
        base=case.config("base", 10000.0),
        mode={"imag2": "imag1"}.get(mode, mode),
    )
    pos = vispe.Positions(places.double()[:, None] if places.ndim == 1 else places.double()[..., None])
    # the angles are those of the frequencies of the case
    wanted = places.double()[..., None] * case.param("inv_freq").double()
    case.agree("the angles", encoding.angles(pos)[:, 0], wanted.expand(1, *wanted.shape[-2:]))
    q, k = (t.clone().requires_grad_() for t in given.values())
    turn = encoding.transform(pos, 0)
    found = {"q_rot": turn.query(q.repeat_interleave(times, 1)), "k_rot": turn.key(k)}
    found["scores"] = found["q_rot"] @ found["k_rot"].repeat_interleave(heads // k.shape[1], 1).mT
    if case.backward(cotangent=found["scores"]):
        found |= {"grad.q": q.grad, "grad.k": k.grad}
    yield "transform", {name: value for name, value in found.items() if name in case.output_names}
    # attention of groups of query heads gives what these scores do
    v = torch.randn(k.shape, dtype=k.dtype, generator=torch.Generator().manual_seed(0))
    wide = v.repeat_interleave(heads // k.shape[1], 1)
    wanted = (found["scores"] * width**-0.5).softmax(-1) @ wide
    for backend in ("reference", "sdpa"):
        out = vispe.attention(
            q.repeat_interleave(times, 1), k, v, transform=turn, enable_gqa=True, backend=backend
        )
        case.agree(f"the output of {backend}", out, wanted)
