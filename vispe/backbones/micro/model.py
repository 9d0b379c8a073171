"""A small D4-equivariant backbone with dense features: convolutions, a transformer with 2D ALiBi, convolutions."""

from __future__ import annotations

from torch import Tensor, nn

from vispe.backbones.micro.equivariant_conv import Gelu, SymmetricConv
from vispe.backbones.micro.trunk import Trunk
from vispe.errors import OptionError, ShapeError

STRIDE = 2  # pixels between feature vectors
PATCH = 16  # pixels between tokens
_MEAN, _STD = 0.5, 0.25


class Micro(nn.Module):
    """Encoder-decoder that returns `dim` features of texture, shape and context for every second pixel.

    An overlapping stem of symmetric convolutions reduces the image to tokens of 16 pixels; the tokens attend
    to each other in a vision transformer with `alibi2d(slopes=learned,normalize=reference,wrap=false)`;
    symmetric convolutions upsample the result to a stride of 2, with skip connections from the stem at every
    stride, which preserve thin structures. Every part commutes with the eight poses of a square, and no part
    depends on absolute position.

    Args:
        dim: number of features.
        widths: numbers of channels at strides 2, 4 and 8.
        width: width of the transformer.
        depth: number of blocks.
        heads: number of its heads, a divisor of `width`.

    Raises:
        OptionError: `heads` does not divide `width`.

    >>> import torch
    >>> Micro(dim=8, depth=1)(torch.zeros(1, 1, 32, 48)).shape
    torch.Size([1, 8, 16, 24])

    Shapes: (b, 3, h, w) in [0, 1], or (b, 1, h, w) for grey, equivalent to three equal channels at less cost ->
    (b, dim, h / 2, w / 2), for h and w that are multiples of 16.
    """

    def __init__(
        self,
        dim: int = 32,
        widths: tuple[int, int, int] = (16, 48, 96),
        width: int = 160,
        depth: int = 4,
        heads: int = 5,
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise OptionError(f"vispe_micro: heads must divide width, got width={width}, heads={heads}.")
        fine, middle, coarse = widths
        self.dim = dim
        self.front = nn.Sequential(SymmetricConv(3, 16, 8, side=6, stride=2), Gelu(), nn.Conv2d(32, fine, 1))
        self.stem = nn.ModuleList(ConvBlock(c) for c in widths)
        self.down = nn.ModuleList(
            SymmetricConv(a, b, 0, side=4, stride=2)
            for a, b in ((fine, middle), (middle, coarse), (coarse, width))
        )
        self.trunk = Trunk(width, depth, heads)
        self.gelu = Gelu()
        widths = ((width, coarse), (coarse, middle), (middle, dim))
        self.up = nn.ModuleList(nn.Conv2d(a, b, 1) for a, b in widths)
        self.back = nn.ModuleList(ConvBlock(c) for c in (coarse, middle))
        self.join = nn.Identity() if fine == dim else nn.Conv2d(fine, dim, 1)
        self.head = nn.Sequential(Gelu(), nn.Conv2d(dim, dim, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of (b, 3, h, w) or (b, 1, h, w) in [0, 1].

        Raises:
            ShapeError: the number of channels is not 1 or 3, or h and w are not multiples of 16.
        """
        divisible = not any(side % PATCH for side in images.shape[-2:])
        if images.ndim != 4 or images.shape[1] not in (1, 3) or not divisible:
            raise ShapeError(
                f"vispe_micro needs images (b, 3, h, w), or (b, 1, h, w) for grey, h and w multiples of {PATCH}, "
                f"got {tuple(images.shape)}. Pad them by reflection."
            )
        x = self.front((images - _MEAN) / _STD)
        skips: list[Tensor] = []
        for block, down in zip(self.stem, self.down, strict=True):
            x = block(x)
            skips.append(x)
            x = self.gelu(down(x))
        x = self.trunk(x)
        # upsample, with the skip connection of each stride
        for number, up in enumerate(self.up):
            x = up(x)
            x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            if number < len(self.back):
                x = self.back[number](x + skips[-1 - number])
        return self.head(x + self.join(skips[0]))


class ConvBlock(nn.Module):
    """Residual block: x + a mixture of symmetric convolutions of x, (b, c, h, w) -> the same shape."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        edges = channels // 4
        self.conv = SymmetricConv(channels, channels, edges)
        self.mix = nn.Conv2d(channels + 2 * edges, channels, 1)
        self.gelu = Gelu()

    def forward(self, x: Tensor) -> Tensor:
        """Return x + mix(gelu(conv(x)))."""
        return x + self.mix(self.gelu(self.conv(x)))
