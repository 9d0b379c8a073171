"""Reinitialisation of collapsed attention heads, with all other weights frozen.

Follows the code of bloom-head-surgery. A head gets new random query, key and value weights and an output projection of
zero, so that the model computes the same as without this head. All other weights are frozen: complete parameters by
`requires_grad`, slices of other heads by masks on the gradient. Masked gradients do not prevent changes by weight decay
or by existing momentum; `guard` restores frozen entries after each optimizer step.

Query, key and value get no gradient in the first step, as the output projection is zero. Fewer collapsed
heads do not imply a better model: compare a held-out loss (in bloom-head-surgery it increased).
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
    """Handle of `reinit_heads`: the reinitialised heads and the hooks that freeze the rest until `release`.

    Attributes:
        heads: reinitialised (layer, head).
        free: partially trained parameters by name, each with a mask (True = trained).
    """

    heads: tuple[tuple[int, int], ...]
    free: dict[str, tuple[nn.Parameter, Tensor]]
    _before: dict[nn.Parameter, bool] = field(repr=False)
    _handles: list[Any] = field(default_factory=list, repr=False)

    @property
    def trained(self) -> int:
        """Number of trained entries."""
        return sum(int(mask.sum()) for _, mask in self.free.values())

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters for an optimizer: those with at least one trained entry."""
        return [parameter for parameter, _ in self.free.values()]

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore frozen entries bit for bit after every step of an optimizer, for any weight decay.

        Raises:
            OptionError: the optimizer has none of the reinitialised parameters.
        """
        ids = {id(p) for p in self.parameters()}
        if not any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            raise OptionError(
                "guard: the optimizer has none of the parameters of the reinitialised heads. Create it from "
                "Reinit.parameters()."
            )
        snapshots = [(p, ~mask, p.detach().clone()) for p, mask in self.free.values()]

        @torch.no_grad()
        def restore(*_: Any) -> None:
            for parameter, frozen, old in snapshots:
                parameter.copy_(torch.where(frozen, old, parameter))

        self._handles.append(optimizer.register_step_post_hook(restore))

    def release(self) -> None:
        """Remove gradient masks and guards, and restore `requires_grad` of all parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter, requires_grad in self._before.items():
            parameter.requires_grad_(requires_grad)


@torch.no_grad()
def reinit_heads(
    model: nn.Module,
    heads: Iterable[tuple[int, int]],
    *,
    init: Literal["uniform", "normal"] = "uniform",
    generator: torch.Generator | None = None,
) -> Reinit:
    """Reinitialise attention heads in place so that their output is zero, and freeze the rest of the model.

    Query, key and value rows of a head are drawn as one Xavier matrix (3 head_dim x width); their biases are set to 0,
    as are the columns of the output projection that belong to the head.

    Args:
        model: a ViT of timm or open_clip, converted or not.
        heads: (layer, head), counted from 0, such as `HeadHealth.heads("sink", "dead")`.
        init: Xavier uniform or normal initialisation.
        generator: random generator on the CPU.

    Returns:
        A handle; call `guard(optimizer)` before training and `release()` after it.

    Raises:
        OptionError: no heads, a head that does not exist, or an unknown `init`.
        UnsupportedHost: a layer mixes its heads before the output projection, or heads share keys.
    """
    chosen = tuple(sorted({(int(layer), int(head)) for layer, head in heads}))
    layers = attention_layers(model)
    if not chosen or init not in ("uniform", "normal"):
        raise OptionError(
            f"reinit_heads: heads must not be empty and init must be 'uniform' or 'normal', got {chosen} and {init!r}. "
            "Pass at least one (layer, head)."
        )
    for layer, head in chosen:  # all checks before the first change
        if not 0 <= layer < len(layers):
            raise OptionError(
                f"reinit_heads: layer must be in 0 to {len(layers) - 1}, got {layer}. Use a valid layer."
            )
        path, module = layers[layer]
        if not 0 <= head < module.num_heads:
            raise OptionError(
                f"reinit_heads: head must be in 0 to {module.num_heads - 1} for {path}, got {head}. Use a valid head."
            )
        if reason := _entangled(module):
            raise UnsupportedHost(f"reinit_heads: heads of {path} cannot be reinitialised: {reason}.")
    names = {id(p): name for name, p in model.named_parameters()}
    free: dict[str, tuple[nn.Parameter, Tensor]] = {}

    def trained_mask(parameter: nn.Parameter) -> Tensor:
        name = names[id(parameter)]
        if name not in free:
            free[name] = (parameter, torch.zeros_like(parameter, dtype=torch.bool))
        return free[name][1]

    for layer, head in chosen:
        module = layers[layer][1]
        inputs, biases, output = _parameters(module)
        head_dim = output.shape[1] // module.num_heads
        fan_in = inputs[0].shape[1]
        fresh = _xavier(3 * head_dim, fan_in, init, generator).to(output)
        head_slice = slice(head * head_dim, (head + 1) * head_dim)
        for (weight, start), drawn in zip(
            _thirds(inputs, output.shape[1]), fresh.split(head_dim), strict=True
        ):
            rows = slice(start + head_slice.start, start + head_slice.stop)
            weight[rows] = drawn
            trained_mask(weight)[rows] = True
        for bias, start in _thirds(biases, output.shape[1]):
            # a key bias may be a buffer of zeros, or be missing
            if isinstance(bias, nn.Parameter):
                rows = slice(start + head_slice.start, start + head_slice.stop)
                bias[rows] = 0
                trained_mask(bias)[rows] = True
        output[:, head_slice] = 0
        trained_mask(output)[:, head_slice] = True
    before = {p: p.requires_grad for p in model.parameters()}
    handle = Reinit(chosen, free, before)
    for parameter in before:
        parameter.requires_grad_(False)
    for parameter, mask in free.values():
        parameter.requires_grad_(True)
        handle._handles.append(parameter.register_hook(lambda grad, mask=mask: torch.where(mask, grad, 0.0)))
    return handle


def _xavier(rows: int, columns: int, init: str, generator: torch.Generator | None) -> Tensor:
    weight = torch.empty(rows, columns)
    draw = nn.init.xavier_uniform_ if init == "uniform" else nn.init.xavier_normal_
    return draw(weight, generator=generator)


def _parameters(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], nn.Parameter]:
    """Return weights of query, key and value (one fused, or three), their biases, and the output projection."""
    output = module.proj if hasattr(module, "proj") else module.out_proj
    if getattr(module, "in_proj_weight", None) is not None:  # torch and open_clip
        biases = [] if module.in_proj_bias is None else [module.in_proj_bias]
        return [module.in_proj_weight], biases, output.weight
    if getattr(module, "qkv", None) is not None:
        weights, biases = [module.qkv.weight], [module.qkv.bias]
        if getattr(module, "q_bias", None) is not None:  # EVA, whose key bias is a buffer of zeros
            biases = [module.q_bias, module.k_bias, module.v_bias]
    else:
        linears = [getattr(module, name) for name in ("q_proj", "k_proj", "v_proj")]
        weights, biases = [m.weight for m in linears], [m.bias for m in linears]
    return weights, biases if any(b is not None for b in biases) else [], output.weight


def _thirds(parameters: list[Any], head_dim: int) -> list[tuple[Any, int]]:
    """Return (parameter, first row) for query, key and value; [] without parameters."""
    if len(parameters) == 1:
        return [(parameters[0], third * head_dim) for third in range(3)]
    return [(parameter, 0) for parameter in parameters]


def _entangled(module: nn.Module) -> str | None:
    """Return why a single head cannot be changed, or None."""
    output = getattr(module, "proj", getattr(module, "out_proj", None))
    if not isinstance(output, nn.Linear):
        return "they have no linear output projection"
    for name in ("norm", "ln_inner"):
        if not isinstance(getattr(module, name, None), (nn.Identity, type(None))):
            return f"their outputs are normalised together ({name})"
    if getattr(module, "num_kv_groups", 1) != 1:
        return "they share keys and values"
    return None
