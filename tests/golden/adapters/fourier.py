"""Golden cases of Fourier features: learned with an MLP, random with and without 2 pi."""

import vispe

NOTES = ("seed", "grid", "wr_drawn_for_this_case")  # parameters and positions are given


def run(case):
    for name in NOTES:
        if name in case.settings:
            case.ignore(name, "parameters and positions are given")
    if "Wr.weight" in case.params:
        yield from _learned(case)
    else:
        yield from _random(case)


def _learned(case):
    groups, each = case.config("groups"), case.config("pos_dim")
    made = vispe.create_encoding(
        "fourier_learned",
        dim=case.config("dim"),
        axes=groups * each,
        groups=groups,
        features=case.config("f_dim"),
        hidden=case.config("h_dim"),
        init="willguimont",
        gamma=float(case.config("gamma")),
        normalize="none",
    )
    state = {name: case.param(name) for name in case.params}
    made.adopt(state, "", "")
    made.load_state_dict(state)
    names = {"Wr.weight": "frequency.weight", "mlp.2.weight": "mlp.1.weight", "mlp.2.bias": "mlp.1.bias"}

    def grads():
        parameters = dict(made.named_parameters())
        return {f"grad.{name}": parameters[names.get(name, name)].grad for name in case.params}

    yield from _routes(case, made, lambda x: x.flatten(-2), grads)


def _random(case):
    two_pi = case.config("two_pi", True)
    frequency = case.param("B")
    axes = case.config("pos_dim")
    if "f_dim" in case.settings:  # (pos_dim, features / 2)
        features, scale, turned = case.config("f_dim"), case.config("sigma"), True
    else:  # (features / 2, pos_dim)
        features, scale, turned = 2 * case.config("mapping_size"), case.config("scale"), False
    made = vispe.create_encoding(
        "fourier",
        dim=features,
        axes=axes,
        scale=float(scale),
        two_pi=two_pi,
        learned=True,
        normalize="none",
    ).to(frequency.dtype)
    made.load_state_dict({"frequency": frequency.t() if turned else frequency})

    def grads():
        grad = made.frequency.grad
        return {} if grad is None else {"grad.B": grad.t() if turned else grad}

    more = {}
    if "pe_none" in case.output_names:
        plain = vispe.create_encoding("fourier", dim=axes, axes=axes, basis="none")
        more = {"pe_none": plain.encode(case.input("positions"))}
    yield from _routes(case, made, lambda x: x, grads, more)


def _routes(case, made, flat, grads, more=()):
    """Positions given to `encode`, and as free coordinates to `table`."""
    for route in ("encode", "table"):
        given = case.input("positions").requires_grad_()
        coords = flat(given)
        if route == "table" and coords.shape[-1] > 3:
            continue
        pe = made.encode(coords) if route == "encode" else made.table(vispe.Positions(coords))
        pe = pe.reshape(case.outputs["pe"].shape)
        made.zero_grad()
        if "cotangent" in case.inputs:
            pe.backward(case.input("cotangent"))
        found = {"pe": pe, "grad.positions": given.grad, **grads(), **dict(more)}
        yield route, {name: value for name, value in found.items() if name in case.output_names}
