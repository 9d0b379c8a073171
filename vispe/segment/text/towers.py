"""Image towers of CLIP models as maps of patch embeddings, for any grid.

A tower is first converted by `vispe.convert`, with the requested encoding or with its own table: it then supports
any input size, with an interpolated table, and its attention layers take a context. The readout of the last block is
implemented as such a context, so it works with every encoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from open_clip.timm_model import TimmModel
from open_clip.transformer import CustomResidualAttentionBlock, ResidualAttentionBlock, VisionTransformer
from timm.layers.format import Format
from timm.models.eva import EvaBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from vispe.encodings.base import Biased
from vispe.errors import UnsupportedCombination, UnsupportedHost, counted
from vispe.hosts.common.context import Context
from vispe.hosts.convert import convert
from vispe.hosts.open_clip.attention import stock_type
from vispe.hosts.open_clip.convert import image_tower
from vispe.segment.text.readouts import Readout, ReadoutContext


class Tower(ABC):
    """An image tower whose last block is read out patch by patch.

    Args:
        visual: image tower of an open_clip model, converted by `prepare`.
        readout: computation of the last block.

    Attributes:
        patch_size: side of a patch in pixels.
        size: height and width of the training images, in pixels.

    Raises:
        UnsupportedHost: non-square patches, or unsupported blocks.
        UnsupportedCombination: the encoding adds to the values, which this readout does not weight.
    """

    blocks: nn.ModuleList

    def __init__(
        self, visual: nn.Module, readout: Readout, patch_size: tuple[int, int], size: tuple[int, int]
    ) -> None:
        if patch_size[0] != patch_size[1]:
            raise UnsupportedHost(
                f"The image tower has patches of {counted(patch_size, 'pixel')}, but square patches are required."
            )
        self.visual, self.readout = visual, readout
        self.patch_size, self.size = int(patch_size[0]), (int(size[0]), int(size[1]))

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        """Return embeddings (b, rows, columns, e), float32, of images (b, 3, h, w), sides multiples of `patch_size`."""
        x, context, shape = self.embed(images)
        last = len(self.blocks) - 1
        for i in range(last):
            x = self.run(i, x, context)
        self._check_values(context, last)
        block, context = self.blocks[last], ReadoutContext(context, self.readout)
        out = self.attention(block, x, context, last)
        if self.readout.residual:
            out = x + out
        if self.readout.mlp:
            out = out + self.mlp(block, out)
        out = context.mix(out, last)
        patches = out[:, out.shape[1] - shape[0] * shape[1] :]
        return self.project(patches).float().unflatten(1, shape)

    def _check_values(self, context: Context, layer: int) -> None:
        """Raise if an encoding adds to the values, but the readout has no attention weights."""
        if self.readout.pairs:
            return
        for e in self.visual.modules():
            if (
                isinstance(e, Biased)
                and e.active(layer)
                and e.value_term(context.positions, layer) is not None
            ):
                raise UnsupportedCombination(
                    f"readout {self.readout.name} uses unweighted values, but {e.name} adds to them. Use "
                    "clearclip or naclip, or another encoding."
                )

    @abstractmethod
    def embed(self, images: Tensor) -> tuple[Tensor, Context, tuple[int, int]]:
        """Return the tokens (b, n, d) of images before the first block, their context and the grid's shape."""

    @abstractmethod
    def run(self, layer: int, x: Tensor, context: Context) -> Tensor:
        """Return the tokens after an unmodified block."""

    @abstractmethod
    def attention(self, block: nn.Module, x: Tensor, context: Context, layer: int) -> Tensor:
        """Return the attention update of the tokens x (b, n, d) in a block."""

    @abstractmethod
    def mlp(self, block: nn.Module, x: Tensor) -> Tensor:
        """Return the MLP update of the tokens x (b, n, d) in a block."""

    @abstractmethod
    def project(self, patches: Tensor) -> Tensor:
        """Project patch tokens (b, m, d) into the space of the text vectors (b, m, e)."""


class OwnTower(Tower):
    """Tower of open_clip's own `VisionTransformer`."""

    def __init__(self, visual: Any, readout: Readout) -> None:
        if visual.attn_pool is not None:
            raise UnsupportedHost(_POOLED)
        super().__init__(visual, readout, visual.patch_size, visual.image_size)
        self.blocks = visual.transformer.resblocks
        _check_block(stock_type(self.blocks[-1]), (ResidualAttentionBlock, CustomResidualAttentionBlock))

    def embed(self, images: Tensor) -> tuple[Tensor, Context, tuple[int, int]]:
        """Return tokens, context and shape of the grid."""
        return self.visual._vispe_embed(images)

    def run(self, layer: int, x: Tensor, context: Context) -> Tensor:
        """Run an unmodified block, with the context as its mask."""
        return self.visual._vispe_block(layer, self.blocks[layer], x, context)

    def attention(self, block: Any, x: Tensor, context: Context, layer: int) -> Tensor:
        """Return the attention update of a block."""
        y = block.ln_1(x)
        if isinstance(block, CustomResidualAttentionBlock):
            return block.ls_1(block.ln_attn(block.attn(y, attn_mask=context)))
        return block.ls_1(block.attention(y, attn_mask=context))

    def mlp(self, block: Any, x: Tensor) -> Tensor:
        """Return the MLP update of a block."""
        return block.ls_2(block.mlp(block.ln_2(x)))

    def project(self, patches: Tensor) -> Tensor:
        """Normalise and project the patches."""
        return self.visual.ln_post(patches) @ self.visual.proj


class TimmTower(Tower):
    """A tower built by timm, with a class token or average pooling and a linear projection."""

    def __init__(self, visual: Any, readout: Readout) -> None:
        trunk = visual.trunk
        if getattr(trunk, "attn_pool", None) is not None:
            raise UnsupportedHost(_POOLED)
        layers = [trunk.head, *visual.head]
        plain = nn.Linear | nn.Identity | nn.Dropout
        unsupported = [type(m).__name__ for m in layers if not isinstance(m, plain)]
        if unsupported or not any(isinstance(m, nn.Linear) for m in layers):
            raise UnsupportedHost(
                f"The image tower ends with {', '.join(unsupported) or 'no projection'}, but zero-shot segmentation "
                "needs a linear projection into the text space, as in ViT-B-16."
            )
        grid, size = trunk.patch_embed.grid_size, trunk.patch_embed.img_size
        super().__init__(visual, readout, (size[0] // grid[0], size[1] // grid[1]), size)
        self.trunk, self.blocks, self.head = trunk, trunk.blocks, nn.Sequential(*layers).eval()
        _check_block(type(self.blocks[-1]), (Block, EvaBlock))

    def embed(self, images: Tensor) -> tuple[Tensor, Context, tuple[int, int]]:
        """Return tokens, context and shape of the grid."""
        rope, shape = (
            getattr(self.trunk, "rope", None),
            [side // self.patch_size for side in images.shape[-2:]],
        )
        if getattr(rope, "feat_shape", None) is not None and list(rope.feat_shape) != shape:
            rope.update_feat_shape(shape)  # timm precomputes the rotations of one grid
        return self.trunk._vispe_embed(images, None, False)

    def run(self, layer: int, x: Tensor, context: Context) -> Tensor:
        """Run an unmodified block, with the context as its mask."""
        return self.trunk._vispe_block(self.blocks[layer], x, context, layer)

    def attention(self, block: Any, x: Tensor, context: Context, layer: int) -> Tensor:
        """Return the attention update of a block."""
        y = block.attn(block.norm1(x), *self.trunk._vispe_arguments(context, layer))
        if isinstance(block, EvaBlock):
            return y if block.gamma_1 is None else block.gamma_1 * y
        return block.ls1(y)

    def mlp(self, block: Any, x: Tensor) -> Tensor:
        """Return the MLP update of a block."""
        y = block.mlp(block.norm2(x))
        if isinstance(block, EvaBlock):
            return y if block.gamma_2 is None else block.gamma_2 * y
        return block.ls2(y)

    def project(self, patches: Tensor) -> Tensor:
        """Normalise and project the patches."""
        return self.head(self.trunk.fc_norm(self.trunk.norm(patches)))


_POOLED = (
    "The image tower pools its patches by attention (SigLIP, PE, CoCa), so its patches are not in the text space. "
    "Use a tower with a class token or average pooling, such as ViT-B-16 or EVA02-B-16."
)


def prepare(model: nn.Module, pos_embed: str | None, readout: Readout) -> None:
    """Convert the image tower of a model for a readout, in place; its weights may be loaded before or after.

    Args:
        model: an open_clip model.
        pos_embed: encoding that replaces the tower's own; None preserves that.
        readout: the readout to be used.

    Raises:
        UnsupportedHost, UnsupportedCombination, UnknownEncoding, OptionError: as `vispe.convert`.
    """
    tower = image_tower(model)
    if pos_embed is None:
        is_open_clip = isinstance(tower, VisionTransformer)
        table = tower.positional_embedding if is_open_clip else getattr(tower, "pos_embed", None)
        rope = getattr(tower, "rope", None)
        convert(model, readout.encoding, keep_abs=table is not None, keep_rope=rope is not None)
    else:
        convert(model, f"{pos_embed}+{readout.encoding}")
    if isinstance(model.visual, TimmModel):
        _any_size(tower)


def read_tower(model: nn.Module, readout: Readout) -> Tower:
    """Return the tower of a model that `prepare` has converted; raises as `Tower`."""
    visual = model.visual.eval().requires_grad_(False)
    return (TimmTower if isinstance(visual, TimmModel) else OwnTower)(visual, readout)


def _any_size(trunk: Any) -> None:
    """Enable any input size in timm's trunk (its `dynamic_img_size`), which open_clip does not expose."""
    trunk.dynamic_img_size = True
    embed = trunk.patch_embed
    embed.strict_img_size, embed.flatten, embed.output_fmt = False, False, Format.NHWC


def _check_block(block: type[nn.Module], known: tuple[type[nn.Module], ...]) -> None:
    if block not in known:
        names = ", ".join(c.__name__ for c in known)
        raise UnsupportedHost(
            f"The last block of the image tower is a {block.__name__}, but readouts support {names}."
        )
