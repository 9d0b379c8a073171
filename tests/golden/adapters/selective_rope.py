"""Golden cases of Selective RoPE: angles read from the tokens, turned queries and keys, and gradients."""

import torch

import vispe

NAMES = {
    "temperature": "temperature",
    "phi_proj.0.weight": "down.weight",
    "phi_proj.1.weight": "up.weight",
    "phi_proj.weight": "weight",
    "phi_proj.scalar": "scalar",
    "phi_conv1d.weight": "taps",
    "phi_bias": "drift_log",
    "phase_gate_proj.weight": "gate_proj.weight",
    "phase_gate_proj.bias": "gate_proj.bias",
}


def run(case):
    heads, width, dim = case.config("H"), case.config("D"), case.config("model_dim")
    length, full = case.config("N"), "phi_proj.scalar" in case.params
    # what a case has says what was asked for; its words must agree
    if case.config("phi_parametrization", "full-rank" if full else "low-rank").startswith("full") != full:
        raise ValueError("the parametrization is not that of the parameters")
    rank = 16 if full else case.param("phi_proj.0.weight").shape[0]
    if not full and case.config("phi_proj_rank", rank) != rank:
        raise ValueError(f"the rank is {rank}")
    has = {
        "gate": ("use_gate", "phase_gate_proj.weight" in case.params),
        "drift": ("use_phi_bias", "phi_bias" in case.params),
    }
    if any(case.config(key, asked) != asked for key, asked in has.values()):
        raise ValueError("the options are not those of the parameters")
    skip = "phi_conv1d.weight" not in case.params
    if case.config("skip_conv", skip) != skip:
        raise ValueError("skip_conv is not that of the parameters")
    for key in ("temperature_type", "temp_type", "temperature_init", "t_max", "temp_max", "temp_theta"):
        case.ignore(key, "how the temperature started; it is given")
    encoding = vispe.create_encoding(
        "selective_rope.scan",
        dim=dim,
        num_heads=heads,
        head_dim=width,
        projection="full" if full else "low",
        rank=rank,
        filter="difference" if skip else "learned",
        eps=case.config("l2_eps", 1e-6),
        **{option: asked for option, (_, asked) in has.items()},
    ).double()
    for theirs in case.params:
        with torch.no_grad():
            own = encoding.get_parameter(NAMES[theirs])
            own.copy_(_shared(case.param(theirs), own))
    pos = vispe.Grid((length,)).positions()
    q, k, x = (case.input(name).double().requires_grad_() for name in "qkx")
    if q.shape != (case.config("B"), length, heads, width):
        raise ValueError(f"q is {tuple(q.shape)}")
    turn = encoding.transform(pos, 0, x)
    turned = turn.query(q.transpose(1, 2)), turn.key(k.transpose(1, 2))
    found = {"q_rot": turned[0].transpose(1, 2), "k_rot": turned[1].transpose(1, 2)}
    found["scores"] = turned[0] @ turned[1].mT
    if case.backward(cotangent=found["scores"]):
        found |= {"grad.q": q.grad, "grad.k": k.grad, "grad.x": x.grad}
        for theirs in case.params:
            own, given = encoding.get_parameter(NAMES[theirs]), case.param(theirs)
            found[f"grad.{theirs}"] = own.grad.sum_to_size(_shared(given, own).shape).reshape(given.shape)
    yield "scan", {name: value for name, value in found.items() if name in case.output_names}
    outs = [
        vispe.attention(*(t.transpose(1, 2) for t in (q, k, q)), transform=turn, is_causal=True, backend=b)
        for b in ("reference", "sdpa")
    ]
    case.agree("the outputs of the backends", *outs)


def _shared(given, own):
    """Return a parameter in the shape of ours, or one that broadcasts to it where heads or pairs share values."""
    if given.numel() == own.numel():
        return given.reshape(own.shape)
    heads, pairs = own.shape
    return given.reshape({pairs: (1, pairs), heads: (heads, 1), 1: (1, 1)}[given.numel()])
