"""Golden cases of Selective RoPE: content-dependent angles, rotated queries and keys, and gradients."""

import torch
from torch.func import functional_call

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


LOW = ("phase_gate_proj.0.weight", "phase_gate_proj.1.weight", "phase_gate_proj.1.bias")
STARTS = {
    *("temperature_type", "temp_type", "temperature_init", "t_max", "temp_max", "temp_theta", "temp_grad"),
    *("use_triton", "fuse_gate"),
}


class _Transform(torch.nn.Module):
    """Calls `transform` by `forward`, for `functional_call`."""

    def __init__(self, encoding):
        super().__init__()
        self.encoding = encoding

    def forward(self, pos, x):
        return self.encoding.transform(pos, 0, x)


def run(case):
    heads, width, dim = case.config("H"), case.config("D"), case.config("model_dim")
    length, full = case.config("N"), "phi_proj.scalar" in case.params
    # the arrays of a case determine the request; its description must agree
    if case.config("phi_parametrization", "full-rank" if full else "low-rank").startswith("full") != full:
        raise ValueError("the parametrization is not that of the parameters")
    rank = 16 if full else case.param("phi_proj.0.weight").shape[0]
    if not full and case.config("phi_proj_rank", rank) != rank:
        raise ValueError(f"the rank is {rank}")
    gate = any(name.startswith("phase_gate_proj.") for name in case.params)
    drift = "phi_bias" in case.params
    flags = {"use_gate": gate, "use_bias": drift, "use_phi_bias": drift}
    if any(case.config(key, expected) != expected for key, expected in flags.items()):
        raise ValueError("the options are not those of the parameters")
    skip = "phi_conv1d.weight" not in case.params
    if case.config("skip_conv", skip) != skip:
        raise ValueError("skip_conv is not that of the parameters")
    size = 4 if skip else case.param("phi_conv1d.weight").shape[-1]
    if case.config("d_conv", size) != size and not skip:
        raise ValueError(f"the filter has {size} taps")
    if case.config("conv_act", None) is not None:
        raise ValueError("a filter with an activation is not supported")
    # a gate of low rank has two maps in a row, whose product is the one map of the encoding
    low = "phase_gate_proj.0.weight" in case.params
    if case.config("gate_parametrization", "low-rank" if low else "standard") != (
        "low-rank" if low else "standard"
    ) and (gate or low):
        raise ValueError("the parametrization of the gate is not that of the parameters")
    if low and case.config("gate_low_rank_dim", None) not in (
        None,
        len(case.param("phase_gate_proj.0.weight")),
    ):
        raise ValueError("the rank of the gate is not that of the parameters")
    if "gate_low_rank_dim" in case.settings:
        case.ignore("gate_low_rank_dim", "the rank is that of the parameters")
    for key in STARTS & set(case.settings):
        case.ignore(key, "how the temperature started, or how the reference computes; the values are given")
    encoding = vispe.create_encoding(
        "selective_rope.scan",
        dim=dim,
        num_heads=heads,
        head_dim=width,
        projection="full" if full else "low",
        rank=rank,
        filter="difference" if skip else "learned",
        kernel_size=size,
        eps=case.config("l2_eps", 1e-6),
        gate=gate,
        drift=drift,
    ).double()
    for theirs in case.params - set(LOW if low else ()):
        with torch.no_grad():
            parameter = encoding.get_parameter(NAMES[theirs])
            parameter.copy_(_shared(case.param(theirs), parameter))
    maps = [case.param(name).double().requires_grad_() for name in LOW] if low else []
    pos = vispe.Grid((length,)).positions()
    q, k, x = (case.input(name).double().requires_grad_() for name in "qkx")
    if q.shape != (case.config("B"), length, heads, width):
        raise ValueError(f"q is {tuple(q.shape)}")
    inputs = {"gate_proj.weight": maps[1] @ maps[0], "gate_proj.bias": maps[2]} if low else {}
    transform = functional_call(
        _Transform(encoding), {f"encoding.{k}": v for k, v in inputs.items()}, (pos, x)
    )
    rotated = transform.query(q.transpose(1, 2)), transform.key(k.transpose(1, 2))
    actual = {"q_rot": rotated[0].transpose(1, 2), "k_rot": rotated[1].transpose(1, 2)}
    actual["scores"] = rotated[0] @ rotated[1].mT
    if case.backward(cotangent=actual["scores"]):
        actual |= {"grad.q": q.grad, "grad.k": k.grad, "grad.x": x.grad}
        actual |= {f"grad.{name}": value.grad for name, value in zip(LOW, maps, strict=False)}
        for theirs in case.params - set(LOW if low else ()):
            parameter, inputs = encoding.get_parameter(NAMES[theirs]), case.param(theirs)
            actual[f"grad.{theirs}"] = parameter.grad.sum_to_size(_shared(inputs, parameter).shape).reshape(
                inputs.shape
            )
    yield "scan", {name: value for name, value in actual.items() if name in case.output_names}
    outs = [
        vispe.attention(
            *(t.transpose(1, 2) for t in (q, k, q)), transform=transform, is_causal=True, backend=b
        )
        for b in ("reference", "sdpa")
    ]
    case.agree("the outputs of the backends", *outs)


def _shared(inputs, parameter):
    """Return a parameter in the shape of `parameter`, or one that broadcasts to it if heads or pairs share values."""
    if inputs.numel() == parameter.numel():
        return inputs.reshape(parameter.shape)
    heads, pairs = parameter.shape
    return inputs.reshape({pairs: (1, pairs), heads: (heads, 1), 1: (1, 1)}[inputs.numel()])
