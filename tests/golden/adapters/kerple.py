"""Golden cases of Kerple: the biases of both kernels, and weighted logits."""

import torch

import vispe
from tests.golden.adapters._line import places

NAMES = {"bias_p": "p", "bias_a": "a", "wei_p": "weight_p", "wei_a": "weight_a"}


def run(case):
    heads, length = case.config("heads"), case.config("seq_len")
    weighted = "wei_a" in case.params
    for route, pos in places(length).items():
        made = vispe.create_encoding(
            "kerple",
            num_heads=heads,
            kernel=case.config("kind"),
            positive="clamp",
            eps=case.config("eps"),
            weighted=weighted,
        ).double()
        made.load_state_dict({NAMES[name]: case.param(name).flatten() for name in case.params})
        bias, found = made.bias(pos, 0), {}
        if weighted:
            logits = case.input("logits").double().requires_grad_()
            given = {"q": logits, "k": torch.eye(length).double().expand_as(logits), "scale": 1.0}
            dense, output = bias.dense(**given), "logits"
        else:
            dense, output = bias.dense(), "bias"
        dense = dense.tril() if case.config("causal") else dense
        case.backward(cotangent=dense)
        found = {output: dense, **{f"grad.{n}": made.get_parameter(NAMES[n]).grad for n in case.params}}
        if weighted:
            found["grad.logits"] = logits.grad
        yield route, {name: value for name, value in found.items() if name in case.output_names}
