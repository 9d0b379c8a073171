"""Golden cases of TAPE: stacks of blocks, their tables, and all gradients."""

import torch

import vispe
from vispe.experimental.tape import TapeBlock, tape_state

NAMES = {
    "norm1.weight": "input_layernorm.weight",
    "norm2.weight": "post_attention_layernorm.weight",
    "proj.weight": "self_attn.o_proj.weight",
    "mlp_gate.weight": "mlp.gate_proj.weight",
    "mlp_up.weight": "mlp.up_proj.weight",
    "mlp_down.weight": "mlp.down_proj.weight",
    "state_up.weight": "pe.up_proj.weight",
    "state_gate.weight": "pe.x_proj.weight",
    "state_down.weight": "pe.down_proj.weight",
}
PROJECTIONS = [f"self_attn.{name}_proj.weight" for name in "qkv"]
MIX = "post_attention_linear.weight"


def run(case):
    heads, width, tokens = (case.config(name) for name in ("heads", "head_dim", "N"))
    if case.input("x").shape != (case.config("B"), tokens, heads * width):
        raise ValueError("the tokens are not those of the configuration")
    options = {
        "dim": heads * width,
        "num_heads": heads,
        "hidden": case.config("intermediate"),
        "position_size": case.config("position_size"),
        "act": case.config("act"),
        "eps": case.config("rms_eps"),
        "causal": case.config("causal"),
    }
    start = {
        "num_heads": heads,
        "head_dim": width,
        "temperature": case.config("theta"),
        "shift": case.config("shift"),
    }
    for backend in ("reference", "sdpa"):
        blocks = [TapeBlock(**options, backend=backend) for _ in range(case.config("layers"))]
        for i, block in enumerate(blocks):
            state = {ours: case.param(f"{i}.{theirs}") for ours, theirs in NAMES.items()}
            state["qkv.weight"] = torch.cat([case.param(f"{i}.{name}") for name in PROJECTIONS])
            state["state_gain"] = case.param(f"{i}.{MIX}").double().sum(1)
            block.double().load_state_dict(state)
        # the positions in float64: one token after another on a line
        line = torch.arange(tokens, dtype=torch.float64)[None, :, None]
        yield backend, _run(case, blocks, tape_state(vispe.Positions(line), **start))


def _run(case, blocks, state):
    first = x = case.input("x").double().requires_grad_()
    for block in blocks:
        x, state = block(x, state)
    result = {"y": x, "state": state}
    if case.backward(cotangent=x, cotangent_state=state):
        result["grad.x"] = first.grad
        for i, block in enumerate(blocks):
            for ours, theirs in NAMES.items():
                result[f"grad.{i}.{theirs}"] = block.get_parameter(ours).grad
            grads = block.qkv.weight.grad.chunk(3)
            result |= {f"grad.{i}.{name}": grad for name, grad in zip(PROJECTIONS, grads, strict=True)}
            # every entry of a row counts equally
            result[f"grad.{i}.{MIX}"] = block.state_gain.grad[:, None].expand(
                block.num_heads, block.num_heads
            )
    return {name: value for name, value in result.items() if name in case.output_names}
