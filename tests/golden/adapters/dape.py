"""Golden cases of DAPE: logits adapted by a network, on and below the diagonal of a causal sequence."""

import torch

import vispe
from vispe import Grid
from vispe.attention import DenseBias
from vispe.encodings.parts.bias.adapted_bias import AdaptedBias

# parameters of Kerple, theirs to ours; those of other biases have their own names
NAMES = {"bias_p": "p", "bias_a": "a"}
GIVEN = ("a", "bias", "static_bias", "static")  # the static bias as a matrix


def run(case):
    version, heads, length = case.config("version"), case.config("heads"), case.config("N")
    kind, kernel = case.config("bias"), case.config("kernel", None)
    options = {"width": case.config("width"), "negative_slope": case.config("negative_slope")}
    options |= {"version": version} | ({"kernel": kernel, "causal": True} if version == 2 else {})
    if tuple(case.input("logits").shape) != (case.config("B"), heads, length, length):
        raise ValueError("the logits are not those that the case says")
    net = [name for name in case.params if name.startswith("mlp2.")]
    matrix = next((name for name in GIVEN if name in case.inputs), None)
    extra = sorted(case.params - set(net)) if matrix is None else []
    if kind == "alibi" and matrix is None:
        expected = vispe.create_encoding("alibi", num_heads=heads).head_slopes()
        case.agree("the slopes", torch.tensor(expected), case.param("slopes").flatten())
        extra = []
    inner = "alibi" if matrix is not None else kind
    if matrix is None and "kerple" in kind:
        inner = {"name": "kerple", "kernel": "power" if "power" in kind else "log", "positive": "clamp"}
        inner["eps"] = case.config("eps", 0.01)
    encoding = vispe.create_encoding(
        {"name": "dape", "inner": inner, **options}, num_heads=heads, grid=(length,)
    )
    with torch.no_grad():
        for name in net:
            target = encoding.get_parameter(name)
            target.copy_(case.param(name).reshape(target.shape))
        for name in extra:  # parameters of the bias inside, by its own names
            target = encoding.adapted.get_parameter(NAMES.get(name, name))
            target.copy_(case.param(name).reshape(target.shape))
    encoding.double()
    logits = case.input("logits").double().requires_grad_()
    # queries that are the logits and keys that are the identity
    eye = torch.eye(length, dtype=logits.dtype).expand_as(logits)
    bias = encoding.bias(Grid((length,)).positions(), 0)
    if matrix is not None:
        a = case.input(matrix).double()
        inputs = DenseBias(a.reshape(-1, *a.shape[-3:]), bias.pos)
        bias = AdaptedBias(inputs, bias.network, bias.pos)
    out = (logits + bias.dense(q=logits, k=eye, scale=1.0)).tril()
    case.backward(cotangent=out)
    actual = {"logits": out, "grad.logits": logits.grad}
    for name in net + extra:
        grads = (
            encoding.get_parameter(name)
            if name in net
            else encoding.adapted.get_parameter(NAMES.get(name, name))
        )
        grad = grads.grad
        actual[f"grad.{name}"] = None if grad is None else grad.reshape(case.param(name).shape)
    yield "dense", {name: value for name, value in actual.items() if name in case.output_names}
