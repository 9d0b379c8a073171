"""Golden cases of FIRE: the causal original, on a line and for free coordinates."""

import torch

import vispe
from tests.golden.adapters._line import line

NAMES = {"w1": "mlp.0.weight", "b1": "mlp.0.bias", "w2": "mlp.2.weight", "b2": "mlp.2.bias", "c": "c"}


def run(case):
    length = case.config("seq_len")
    case.agree("the threshold", torch.tensor(case.config("init_L")), case.param("init_L"))
    for name in ("init_c", "L_multiplier"):
        case.ignore(name, "the value is given, or drawn about it")
    names = NAMES | {"L_multiplier": "L_multiplier"}
    free = vispe.Positions(line(length).coords.double())
    for route, pos in (("1D", line(length)), ("free coordinates", free)):
        encoding = vispe.create_encoding(
            "fire",
            num_heads=case.config("num_heads"),
            hidden=case.config("mlp_width"),
            threshold=float(case.param("init_L")),
            eps=case.config("eps"),
            causal=True,
        )
        encoding.load_state_dict({ours: case.param(theirs) for theirs, ours in names.items()})
        encoding.double()
        dense = encoding.bias(pos, 0).dense()
        case.backward(cotangent=dense)
        result = {"bias": dense} | {
            f"grad.{n}": encoding.get_parameter(ours).grad for n, ours in names.items()
        }
        yield route, {name: value for name, value in result.items() if name in case.output_names}
