"""Golden cases of Kerple: the biases of both kernels, and weighted logits."""

import torch

import vispe
from tests.golden.adapters._line import positions

NAMES = {"bias_p": "p", "bias_a": "a", "wei_p": "weight_p", "wei_a": "weight_a"}


def run(case):
    heads, length = case.config("heads"), case.config("seq_len")
    weighted = case.config("weighted", "wei_a" in case.params)
    for route, pos in positions(length).items():
        encoding = vispe.create_encoding(
            "kerple",
            num_heads=heads,
            kernel="log" if "log" in case.config("kind") else "power",
            positive="clamp",
            eps=case.config("eps"),
            weighted=weighted,
        ).double()
        encoding.load_state_dict({NAMES[name]: case.param(name).flatten() for name in case.params})
        dense, result = encoding.bias(pos, 0), {}
        if weighted:  # products of queries and keys are given as one matrix
            (name,) = case.inputs - {"cotangent"}
            logits = case.input(name).double().requires_grad_()
            eye = torch.eye(length).double().expand_as(logits)
            dense = dense.dense(q=logits, k=eye, scale=1.0)
        else:
            dense = dense.dense()
        dense = dense.tril() if case.config("causal") else dense
        if case.backward(cotangent=dense):
            result = {f"grad.{n}": encoding.get_parameter(NAMES[n]).grad for n in case.params}
            result = {n: grad.reshape(case.param(n[5:]).shape) for n, grad in result.items()}
            if weighted:
                result[f"grad.{name}"] = logits.grad
        (output,) = (n for n in case.output_names if not n.startswith("grad."))
        result[output] = dense
        yield route, {n: value for n, value in result.items() if n in case.output_names}
