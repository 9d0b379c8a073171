"""One output of a ViT, handed back to what was seen and to where it was, layer by layer (PA-LRP, arXiv 2506.02138).

Relevance of a number is the number times its gradient, where gradients follow the rules of AttnLRP: both sides of a
product get half, an activation is a factor, the standard deviation of a norm is a constant. Sums and linear layers
then follow the epsilon rule with epsilon 0, without a division. What biases of layers and the softmax take is a leak.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import timm.layers as timm_layers
import torch
from timm.models import VisionTransformer
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from vispe.encodings.base import Encoding, Mixing
from vispe.errors import OptionError, ShapeError, UnsupportedHost
from vispe.evaluate.behaviour.saliency_attention import Rule, Rules, Taken
from vispe.evaluate.behaviour.saliency_rules import split_ratio
from vispe.hosts.timm.attention import STOCK, VispeAttention

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


@dataclass(frozen=True)
class Relevance:
    """Who brought about an output; all float64 on the CPU.

    Attributes:
        output: the number that is handed back.
        tokens: of what is seen, (n,): prefix tokens first, then the patches row-major.
        positions: of where it is, (1 + layers, n): added to tokens, then in the attention of each layer, by the
            token that is turned, or by the key of a bias.
        offsets: of biases between patches, (2 h - 1, 2 w - 1), query less key; 0 without a bias.
        leaks: what layers took, by kind.
        grid: patches (h, w).
    """

    output: float
    tokens: Tensor
    positions: Tensor
    offsets: Tensor
    leaks: dict[str, float]
    grid: tuple[int, int]

    @property
    def shares(self) -> Tensor:
        """Size of the position part over that of both parts, (1 + layers,); the sum is the share of positions.

        Prefix tokens begin as constants, which are neither content nor position and do not count.
        """
        sizes = self.positions.abs().sum(1)
        whole = self.tokens[-self.grid[0] * self.grid[1] :].abs().sum() + sizes.sum()
        return sizes / whole if whole else sizes

    @property
    def gap(self) -> float:
        """Output less all that was handed back, over the output, unsigned: what rounding lost."""
        found = float(self.tokens.sum() + self.positions.sum()) + sum(self.leaks.values())
        return abs(self.output - found) / max(abs(self.output), 1e-30)


def relevance(
    model: nn.Module, image: Tensor, rule: Rule = "epsilon", output: int | None = None
) -> Relevance:
    """Hand an output of a ViT back to tokens and positions.

    The model is changed by hooks alone, which are gone afterwards. Relevance is as exact as its dtype; float64 is safe.

    Args:
        model: timm's VisionTransformer in evaluation mode, as it is or converted: additive tables, rotations of
            pairs and biases that do not read tokens.
        image: (3, H, W), normalised, on the model's device.
        rule: how a sum of content and position is split: 'epsilon', each entry in proportion, or 'ratio', which
            scales both parts to the size of their sums.
        output: which logit; by default the largest, and without a head the length of the pooled descriptor.

    Raises:
        OptionError: the model is in training mode or checkpoints blocks; an unknown rule, or a logit that there is not.
        UnsupportedHost: no rule is known for a part of the model.

    >>> import timm
    >>> found = relevance(timm.create_model("test_vit").eval(), torch.randn(3, 160, 160), output=3)
    >>> found.tokens.shape, found.positions.shape, found.gap < 1e-3
    (torch.Size([101]), torch.Size([7, 101]), True)
    """
    if rule not in ("epsilon", "ratio"):
        raise OptionError(f"Relevance is split by 'epsilon' or 'ratio', got {rule!r}.")
    if model.training:
        raise OptionError(
            "The model is in training mode, where its output is random; call model.eval() first."
        )
    check(model)
    one = Pass(model, rule, (int(image.shape[-2]), int(image.shape[-1])))
    with ExitStack() as handles, torch.enable_grad():
        for handle in one.hooks():
            handles.callback(handle.remove)
        found = model(image[None])[0]
        value = _chosen(found, output, model.num_classes > 0)
        (gradient,) = torch.autograd.grad(value, one.z)
    return one.result(value, gradient)


def check(model: nn.Module) -> None:
    """Raise `UnsupportedHost` or `OptionError` for a part of the model whose relevance cannot be handed on."""
    state = getattr(model, "vispe", None)
    kind = type(model) if state is None else state.stock
    if kind not in (VisionTransformer, VisionTransformerDistilled):
        raise UnsupportedHost(
            f"Relevance is known for timm's VisionTransformer, and this is a {kind.__name__}."
        )
    if model.grad_checkpointing:
        raise OptionError(
            "Blocks would run twice under checkpointing; call model.set_grad_checkpointing(False) first."
        )
    for encoding in () if state is None else model._vispe_all():
        if isinstance(encoding, Mixing) or encoding.reads_tokens or encoding.branched or encoding.prefix_from:
            raise UnsupportedHost(
                f"Relevance of {encoding.name} is not known: it is not a table, a rotation or a bias of all tokens."
            )
    for path, module in _walk(model):
        if STOCK.get(type(module), type(module)) not in _KNOWN or getattr(module, "gate", None) is not None:
            raise UnsupportedHost(f"Relevance through {path}, a {type(module).__name__}, is not known.")


class Pass:
    """The rules of one pass, and what it collects on its way back."""

    def __init__(self, model: nn.Module, rule: Rule, size: tuple[int, int]) -> None:
        self.model = model
        grid = tuple(model.patch_embed.dynamic_feat_size(size))
        self.taken = Taken(rule, (grid[0], grid[1]), model.num_prefix_tokens)

    def hooks(self) -> Any:
        """Put the rules in place; yield the handle of each."""
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
        """Split what came back to the tokens between what was seen and the table."""
        z, prefix = self.z.detach().double().cpu(), self.taken.prefix
        table = z - torch.cat([z[:, :prefix], self.patches.double().cpu()], 1)
        back = gradient.double().cpu()
        seen, placed = (z - table) * back, table * back
        if self.taken.rule == "ratio":
            seen, placed = split_ratio(z - table, table, z * back)
        self.taken.positions[0] = placed[0].sum(-1)
        return Relevance(
            float(value.detach()),
            seen[0].sum(-1),
            self.taken.positions,
            self.taken.offsets,
            dict(self.taken.leaks),
            self.taken.grid,
        )

    def _embed(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.patches = out.detach().flatten(1, -2)
        if self.patches.shape[1] != self.taken.grid[0] * self.taken.grid[1]:
            raise ShapeError(
                f"{self.patches.shape[1]} patches are no grid {self.taken.grid}; give whole images."
            )

    def _begin(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        # what lies before is not asked: the way back ends here
        self.z = args[0].detach().requires_grad_()
        self.taken.positions = torch.zeros(1 + self.layers, self.z.shape[1], dtype=torch.float64)
        return (self.z,)

    def _linear(self, module: nn.Linear, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            self.taken.leak("linear", out, lambda g: g * module.bias.detach())

    def _norm(self, module: nn.LayerNorm, args: tuple[Tensor], out: Tensor) -> Tensor:
        x = args[0]
        # the standard deviation as a constant leaves a linear layer
        y = (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, correction=0, keepdim=True) + module.eps
        ).sqrt().detach()
        y = y if module.weight is None else y * module.weight
        if module.bias is not None:
            y = y + module.bias
            self.taken.leak("norm", y, lambda g: g * module.bias.detach())
        return y

    def _attention(self, layer: int) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
            given = args[1] if len(args) > 1 else kwargs.get("attn_mask")
            return VispeAttention.vispe_attend(module, args[0], Rules(self.taken, layer, given))  # pyright: ignore[reportArgumentType]

        return hook


def _factor(module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
    """Return an activation as a factor of its input."""
    x = args[0]
    return x * torch.where(x == 0, 0.0, out / x).detach()


def _walk(model: nn.Module) -> Any:
    """Yield path and module of everything behind the embedding but encodings, whose layers read no tokens."""
    for name, child in model.named_children():
        if name not in ("patch_embed", "pos_drop", "patch_drop") and not isinstance(child, Encoding):
            yield name, child
            yield from ((f"{name}.{path}", module) for path, module in _walk(child))


def _chosen(found: Tensor, output: int | None, head: bool) -> Tensor:
    if found.ndim != 1:
        raise UnsupportedHost(
            "The model returns tokens and no descriptor, so there is no output; give it a pooling."
        )
    if output is None and not head:
        return found @ (found / found.norm()).detach()
    if output is None:
        return found.max()
    if not head or not 0 <= output < len(found):
        raise OptionError(f"There is no logit {output}; the model has {len(found) if head else 0}.")
    return found[output]
