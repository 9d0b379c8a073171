"""Golden cases of Fourier features: learned with an MLP, random with and without 2 pi.

Cases with gradients run in float64: these are sums in which float32 leaves the rounding of the largest terms.
"""

import vispe

NOTES = ("seed", "grid", "wr_drawn_for_this_case", "train")  # parameters and positions are given


def run(case):
    for name in NOTES:
        if name in case.settings:
            case.ignore(name, "parameters and positions are given")
    if "Wr.weight" in case.params:
        yield from _learned(case)
    else:
        yield from _random(case)


def _learned(case):
    groups, each = case.input("positions").shape[-2:]
    hidden, features = case.param("mlp.0.weight").shape
    dim = groups * len(case.param("mlp.2.weight"))
    for names, expected in (
        (("groups", "g_dim"), groups),
        (("pos_dim",), each),
        (("f_dim",), features),
        (("h_dim",), hidden),
        (("dim", "d_dim"), dim),
    ):
        for name in names:
            if case.config(name, expected) != expected:
                raise ValueError(f"the arrays have {name}={expected}, the case says {case.config(name)}")
    encoding = vispe.create_encoding(
        "fourier_learned",
        dim=dim,
        axes=groups * each,
        groups=groups,
        features=features,
        hidden=hidden,
        init="willguimont",
        gamma=float(case.config("gamma", 1.0)),
        normalize="none",
    )
    state = {name: case.param(name) for name in case.params}
    encoding.rename_checkpoint_keys(state, "", "")
    encoding.load_state_dict(state)
    names = {"Wr.weight": "frequency.weight", "mlp.2.weight": "mlp.1.weight", "mlp.2.bias": "mlp.1.bias"}

    def grads():
        parameters = dict(encoding.named_parameters())
        return {f"grad.{name}": parameters[names.get(name, name)].grad for name in case.params}

    yield from _routes(case, encoding, lambda x: x.flatten(-2), grads)


def _random(case):
    two_pi = case.config("two_pi", True)
    frequency = case.param("B")
    axes = case.config("pos_dim")
    rotated = "f_dim" in case.settings  # (pos_dim, features / 2), otherwise (features / 2, pos_dim)
    features = 2 * frequency.shape[1 if rotated else 0]
    scale = case.config("sigma" if rotated else "scale", 1.0)
    if case.config("f_dim" if rotated else "mapping_size", None) not in (features, features // 2, None):
        raise ValueError(f"the frequencies of the case give {features} features")
    encoding = vispe.create_encoding(
        "fourier",
        dim=features,
        axes=axes,
        scale=float(scale),
        two_pi=two_pi,
        learned=True,
        normalize="none",
    ).to(frequency.dtype)
    encoding.load_state_dict({"frequency": frequency.t() if rotated else frequency})

    def grads():
        grad = encoding.frequency.grad
        return {} if grad is None else {"grad.B": grad.t() if rotated else grad}

    extra_outputs = {}
    if "pe_none" in case.output_names:
        plain = vispe.create_encoding("fourier", dim=axes, axes=axes, basis="none")
        extra_outputs = {"pe_none": plain.encode(case.input("positions"))}
    yield from _routes(case, encoding, lambda x: x, grads, extra_outputs)


def _routes(case, encoding, flat, grads, extra_outputs=()):
    """Yield the outputs of `encode`, and of `table` for free coordinates."""
    exact = "cotangent" in case.inputs
    encoding = encoding.double() if exact else encoding
    for route in ("encode", "table"):
        positions = case.input("positions")
        inputs = (positions.double() if exact else positions).requires_grad_()
        coords = flat(inputs)
        if route == "table" and coords.shape[-1] > 3:
            continue
        flattened = coords.reshape(*coords.shape[:1], -1, coords.shape[-1]) if coords.ndim > 3 else coords
        pe = encoding.encode(coords) if route == "encode" else encoding.table(vispe.Positions(flattened))
        pe = pe.reshape(case.outputs["pe"].shape)
        encoding.zero_grad()
        case.backward(cotangent=pe)
        result = {"pe": pe, "grad.positions": inputs.grad, **grads(), **dict(extra_outputs)}
        yield route, {name: value for name, value in result.items() if name in case.output_names}
