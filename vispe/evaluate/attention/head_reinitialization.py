"""Give collapsed attention heads a new start, and train nothing but them.

A head is replaced by one with fresh query, key and value weights and an output projection of zero, so that the model
computes what it would without the head and all other heads are untouched. The rest is frozen: whole parameters by
`requires_grad`, the other heads' share of a parameter by masks on the gradient. Masked gradients do not hold an
entry still under weight decay or under momentum from before; `guard` puts frozen entries back after each step.

Expected: with an output of zero, query, key and value get no gradient in the first step. Fewer collapsed heads are
not yet a better model: judge by a held-out loss (bloom-head-surgery, where health rose and held-out loss did too).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vispe.backbones.attention_recorder import attention_layers
from vispe.errors import OptionError, UnsupportedHost


@dataclass(eq=False)
class Reinit:
    """What `reinit_heads` changed, and what keeps all else still until `release` is called.

    Attributes:
        heads: (layer, head) that were replaced.
        free: parameters that are trained in part, by name, with a mask (True = trained).
    """

    heads: tuple[tuple[int, int], ...]
    free: dict[str, tuple[nn.Parameter, Tensor]]
    _before: dict[nn.Parameter, bool] = field(repr=False)
    _handles: list[Any] = field(default_factory=list, repr=False)

    @property
    def trained(self) -> int:
        """How many numbers are trained."""
        return sum(int(mask.sum()) for _, mask in self.free.values())

    def parameters(self) -> list[nn.Parameter]:
        """Return what to give an optimizer: parameters of which at least a part is trained."""
        return [parameter for parameter, _ in self.free.values()]

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Put frozen entries back, bit by bit, after every step of an optimizer, whatever its weight decay.

        Raises:
            OptionError: the optimizer trains none of the parameters.
        """
        mine = {id(p) for p in self.parameters()}
        if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            raise OptionError(
                "The optimizer has none of the replaced heads' parameters; make it from Reinit.parameters()."
            )
        kept = [(p, ~mask, p.detach().clone()) for p, mask in self.free.values()]

        @torch.no_grad()
        def put_back(*_: Any) -> None:
            for parameter, frozen, old in kept:
                parameter.copy_(torch.where(frozen, old, parameter))

        self._handles.append(optimizer.register_step_post_hook(put_back))

    def release(self) -> None:
        """Remove masks and guards, and let those parameters be trained that were trained before."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter, trains in self._before.items():
            parameter.requires_grad_(trains)


@torch.no_grad()
def reinit_heads(
    model: nn.Module,
    heads: Iterable[tuple[int, int]],
    *,
    init: Literal["uniform", "normal"] = "uniform",
    generator: torch.Generator | None = None,
) -> Reinit:
    """Replace attention heads by untrained ones that add nothing yet, in place, and freeze the rest of the model.

    Query, key and value rows of a head are drawn together as one Xavier matrix (3 head widths x width), their biases
    are 0, and so are the columns of the output projection that read the head.

    Args:
        model: a ViT of timm or open_clip, converted or not.
        heads: (layer, head), counted from 0; those of `HeadHealth.heads("sink", "dead")`, say.
        init: Xavier's uniform or normal distribution.
        generator: source of the draws, on the CPU.

    Returns:
        What was done; call `guard(optimizer)` before training and `release()` after it.

    Raises:
        OptionError: no heads, a head that the model does not have, or an unknown `init`.
        UnsupportedHost: a layer mixes its heads before the output projection, or shares keys among them.
    """
    chosen = tuple(sorted({(int(layer), int(head)) for layer, head in heads}))
    layers = attention_layers(model)
    if not chosen or init not in ("uniform", "normal"):
        raise OptionError(f"reinit_heads needs heads and init uniform or normal, got {chosen} and {init!r}.")
    for layer, head in chosen:  # all checks before the first change
        if not 0 <= layer < len(layers):
            raise OptionError(f"There is no layer {layer}; the model has layers 0 to {len(layers) - 1}.")
        path, module = layers[layer]
        if not 0 <= head < module.num_heads:
            raise OptionError(f"There is no head {head} in {path}; it has heads 0 to {module.num_heads - 1}.")
        if reason := _entangled(module):
            raise UnsupportedHost(f"Heads of {path} cannot be replaced: {reason}.")
    names = {id(p): name for name, p in model.named_parameters()}
    free: dict[str, tuple[nn.Parameter, Tensor]] = {}

    def part(parameter: nn.Parameter) -> Tensor:
        name = names[id(parameter)]
        if name not in free:
            free[name] = (parameter, torch.zeros_like(parameter, dtype=torch.bool))
        return free[name][1]

    for layer, head in chosen:
        module = layers[layer][1]
        inputs, biases, output = _parameters(module)
        width = output.shape[1] // module.num_heads
        fan_in = inputs[0].shape[1]
        fresh = _xavier(3 * width, fan_in, init, generator).to(output)
        own = slice(head * width, (head + 1) * width)
        for (weight, start), drawn in zip(_thirds(inputs, output.shape[1]), fresh.split(width), strict=True):
            rows = slice(start + own.start, start + own.stop)
            weight[rows] = drawn
            part(weight)[rows] = True
        for bias, start in _thirds(biases, output.shape[1]):
            # a key bias may be a buffer of zeros, or be missing
            if isinstance(bias, nn.Parameter):
                rows = slice(start + own.start, start + own.stop)
                bias[rows] = 0
                part(bias)[rows] = True
        output[:, own] = 0
        part(output)[:, own] = True
    before = {p: p.requires_grad for p in model.parameters()}
    done = Reinit(chosen, free, before)
    for parameter in before:
        parameter.requires_grad_(False)
    for parameter, mask in free.values():
        parameter.requires_grad_(True)
        done._handles.append(parameter.register_hook(lambda grad, mask=mask: torch.where(mask, grad, 0.0)))
    return done


def _xavier(rows: int, columns: int, init: str, generator: torch.Generator | None) -> Tensor:
    weight = torch.empty(rows, columns)
    draw = nn.init.xavier_uniform_ if init == "uniform" else nn.init.xavier_normal_
    return draw(weight, generator=generator)


def _parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], nn.Parameter]:
    """Return weights of query, key and value (one, rows q, k, v, or three), their biases alike, the output's weight."""
    output = module.proj if hasattr(module, "proj") else module.out_proj
    if getattr(module, "in_proj_weight", None) is not None:  # of torch and of open_clip
        biases = [] if module.in_proj_bias is None else [module.in_proj_bias]
        return [module.in_proj_weight], biases, output.weight
    if getattr(module, "qkv", None) is not None:
        weights, biases = [module.qkv.weight], [module.qkv.bias]
        if getattr(module, "q_bias", None) is not None:  # of Eva, whose key bias is a buffer of zeros
            biases = [module.q_bias, module.k_bias, module.v_bias]
    else:
        linears = [getattr(module, name) for name in ("q_proj", "k_proj", "v_proj")]
        weights, biases = [m.weight for m in linears], [m.bias for m in linears]
    return weights, biases if any(b is not None for b in biases) else [], output.weight


def _thirds(parameters: list[Any], width: int) -> list[tuple[Any, int]]:
    """Return for query, key and value the parameter and the row at which it starts there; nothing for nothing."""
    if len(parameters) == 1:
        return [(parameters[0], third * width) for third in range(3)]
    return [(parameter, 0) for parameter in parameters]


def _entangled(module: nn.Module) -> str | None:
    """Return why a head cannot be taken alone, or None."""
    output = getattr(module, "proj", getattr(module, "out_proj", None))
    if not isinstance(output, nn.Linear):
        return "they have no linear output projection of their own"
    for name in ("norm", "ln_inner"):
        if not isinstance(getattr(module, name, None), (nn.Identity, type(None))):
            return f"their outputs are normalised together ({name})"
    if getattr(module, "num_kv_groups", 1) != 1:
        return "they share keys and values"
    return None
