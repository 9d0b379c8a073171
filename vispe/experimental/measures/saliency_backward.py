"""Relevance propagation from an output of a ViT to its tokens and positions (PA-LRP, arXiv 2506.02138).

Relevance is input times gradient, with gradients modified by the rules of AttnLRP: both factors of a product get half
of its relevance, an activation is treated as a constant factor of its input, and the standard deviation in a
normalisation layer as a constant. Sums and linear layers then follow the epsilon rule with epsilon 0, without a
division. The relevance absorbed by biases of layers and by the softmax is reported as leaks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import timm.layers as timm_layers
import torch
from timm.models import VisionTransformer
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from vispe.encodings.base import Encoding, Mixing
from vispe.errors import OptionError, ShapeError, UnsupportedHost, counted
from vispe.experimental.measures.relevance import Relevance
from vispe.experimental.measures.saliency_attention import RelevanceContext, RelevanceSums, Rule
from vispe.experimental.measures.saliency_rules import split_ratio
from vispe.hosts.timm.attention import STOCK, VispeAttention
from vispe.utils.options import checked

_NORMS = (nn.LayerNorm, timm_layers.LayerNorm)
_ACTIVATIONS = (nn.GELU, nn.ReLU, nn.SiLU, timm_layers.GELU, timm_layers.GELUTanh, timm_layers.QuickGELU)
_LINEAR = (nn.Linear, nn.Identity, nn.Dropout, timm_layers.DropPath, timm_layers.LayerScale)
_KNOWN = (
    *_NORMS,
    *_ACTIVATIONS,
    *_LINEAR,
    timm_layers.Attention,
    timm_layers.Mlp,
    Block,
    nn.Sequential,
    nn.ModuleList,
)


@checked
def relevance(
    model: nn.Module, image: Tensor, rule: Literal["epsilon", "ratio"] = "epsilon", output: int | None = None
) -> Relevance:
    """Propagate an output of a ViT to tokens and positions.

    The model is modified only by temporary hooks. The precision is that of the dtype; use float64 for exact results.

    Args:
        model: timm's VisionTransformer in evaluation mode, original or converted, with additive tables, rotations of
            channel pairs and biases that do not read tokens.
        image: (3, H, W), normalised, on the device of the model.
        rule: split of a sum of content and position: 'epsilon', in proportion per entry, or 'ratio', rescaled by the
            absolute sums of both parts.
        output: index of the logit; by default the largest, and without a head the norm of the pooled descriptor.

    Raises:
        OptionError: the model is in training mode or uses gradient checkpointing, or the rule or the logit
            does not exist.
        UnsupportedHost: there is no rule for a part of the model.

    >>> import timm
    >>> result = relevance(timm.create_model("test_vit").eval(), torch.randn(3, 160, 160), output=3)
    >>> result.tokens.shape, result.positions.shape, result.gap < 1e-3
    (torch.Size([101]), torch.Size([7, 101]), True)
    """
    if model.training:
        raise OptionError(
            "relevance: the model is in training mode, got model.training=True. Call model.eval() first."
        )
    check(model)
    one = BackwardPass(model, rule, (int(image.shape[-2]), int(image.shape[-1])))
    with ExitStack() as handles, torch.enable_grad():
        for handle in one.hooks():
            handles.callback(handle.remove)
        outputs = model(image[None])[0]
        value = _chosen(outputs, output, model.num_classes > 0)
        (gradient,) = torch.autograd.grad(value, one.z)
    return one.result(value, gradient)


def check(model: nn.Module) -> None:
    """Raise `UnsupportedHost` or `OptionError` for a part of the model without a propagation rule."""
    state = getattr(model, "vispe", None)
    kind = type(model) if state is None else state.stock
    if kind not in (VisionTransformer, VisionTransformerDistilled):
        raise UnsupportedHost(
            f"relevance: model must be a VisionTransformer of timm, got {kind.__name__}. Pass a timm model."
        )
    if model.grad_checkpointing:
        raise OptionError(
            "relevance: gradient checkpointing would run blocks twice, got model.grad_checkpointing=True. Call "
            "model.set_grad_checkpointing(False) first."
        )
    for encoding in () if state is None else model._vispe_all():
        if (
            isinstance(encoding, Mixing)
            or encoding.reads_tokens
            or encoding.multi_softmax
            or encoding.prefix_from
        ):
            raise UnsupportedHost(
                f"relevance: no rule for {encoding.name}. Use a table, a rotation or a bias of all tokens."
            )
    for path, module in _walk(model):
        if STOCK.get(type(module), type(module)) not in _KNOWN or getattr(module, "gate", None) is not None:
            raise UnsupportedHost(f"relevance: no rule for {path}, got a {type(module).__name__}.")


class BackwardPass:
    """Hooks with the rules of one backward pass, and the relevance that it collects."""

    def __init__(self, model: nn.Module, rule: Rule, size: tuple[int, int]) -> None:
        self.model = model
        grid = tuple(model.patch_embed.dynamic_feat_size(size))
        self.sums = RelevanceSums(rule, (grid[0], grid[1]), model.num_prefix_tokens)

    def hooks(self) -> Any:
        """Register the rules as hooks; yield their handles."""
        yield self.model.patch_embed.register_forward_hook(self._embed)
        yield self.model.norm_pre.register_forward_pre_hook(self._begin)
        layer = 0
        for _, module in _walk(self.model):
            if isinstance(module, timm_layers.Attention):
                layer += 1
                yield module.register_forward_hook(self._attention(layer), with_kwargs=True)
            elif isinstance(module, _NORMS):
                yield module.register_forward_hook(self._norm)
            elif isinstance(module, _ACTIVATIONS):
                yield module.register_forward_hook(_factor)
            elif isinstance(module, nn.Linear) and module.bias is not None:
                yield module.register_forward_hook(self._linear)
        self.layers = layer

    def result(self, value: Tensor, gradient: Tensor) -> Relevance:
        """Split the relevance of the embedded tokens between content and the additive table."""
        z, prefix = self.z.detach().double().cpu(), self.sums.prefix
        table = z - torch.cat([z[:, :prefix], self.patches.double().cpu()], 1)
        back = gradient.double().cpu()
        content, from_table = (z - table) * back, table * back
        if self.sums.rule == "ratio":
            content, from_table = split_ratio(z - table, table, z * back)
        self.sums.positions[0] = from_table[0].sum(-1)
        return Relevance(
            float(value.detach()),
            content[0].sum(-1),
            self.sums.positions,
            self.sums.offsets,
            dict(self.sums.leaks),
            self.sums.grid,
        )

    def _embed(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.patches = out.detach().flatten(1, -2)
        if self.patches.shape[1] != self.sums.grid[0] * self.sums.grid[1]:
            raise ShapeError(
                f"relevance: patches must form the grid {self.sums.grid}, got "
                f"{counted(self.patches.shape[1], 'patch')}. Pass complete images."
            )

    def _begin(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        # the backward pass ends at the embedded tokens
        self.z = args[0].detach().requires_grad_()
        self.sums.positions = torch.zeros(1 + self.layers, self.z.shape[1], dtype=torch.float64)
        return (self.z,)

    def _linear(self, module: nn.Linear, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            self.sums.leak("linear", out, lambda g: g * module.bias.detach())

    def _norm(self, module: nn.LayerNorm, args: tuple[Tensor], out: Tensor) -> Tensor:
        x = args[0]
        # with a constant standard deviation the norm is a linear layer
        y = (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, correction=0, keepdim=True) + module.eps
        ).sqrt().detach()
        y = y if module.weight is None else y * module.weight
        if module.bias is not None:
            y = y + module.bias
            self.sums.leak("norm", y, lambda g: g * module.bias.detach())
        return y

    def _attention(self, layer: int) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
            attn_mask = args[1] if len(args) > 1 else kwargs.get("attn_mask")
            return VispeAttention.vispe_attend(module, args[0], RelevanceContext(self.sums, layer, attn_mask))  # pyright: ignore[reportArgumentType]

        return hook


def _factor(module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
    """Return the output of an activation as its input times a constant factor."""
    x = args[0]
    return x * torch.where(x == 0, 0.0, out / x).detach()


def _walk(model: nn.Module) -> Any:
    """Yield path and module of everything after the embedding except encodings, whose layers do not read tokens."""
    for name, child in model.named_children():
        if name not in ("patch_embed", "pos_drop", "patch_drop") and not isinstance(child, Encoding):
            yield name, child
            yield from ((f"{name}.{path}", module) for path, module in _walk(child))


def _chosen(outputs: Tensor, output: int | None, head: bool) -> Tensor:
    if outputs.ndim != 1:
        raise UnsupportedHost(
            "relevance: the model returns tokens instead of a descriptor, so there is no output. Set global_pool."
        )
    if output is None and not head:
        return outputs @ (outputs / outputs.norm()).detach()
    if output is None:
        return outputs.max()
    if not head or not 0 <= output < len(outputs):
        raise OptionError(
            f"relevance: output must index {len(outputs) if head else 0} logits, got {output}. Use a valid index."
        )
    return outputs[output]
