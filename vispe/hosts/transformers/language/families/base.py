"""Description of a family of vision-language models: image placeholders, and the scheme of its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from vispe.multimodal import Image, Scheme, Video, create_scheme


@dataclass(frozen=True)
class CallTokens:
    """Tokens of a call, and its arguments with images.

    Attributes:
        model: the model without its head.
        types: type of every token (b, s), 0 text, 1 image, 2 video.
        mask: whether a token is not padding (b, s).
        documents: index of the packed sample of each token (b, s).
        arguments: keyword arguments of the model.
    """

    model: Any
    types: Tensor
    mask: Tensor
    documents: Tensor
    arguments: dict[str, Any]

    @property
    def config(self) -> Any:
        """Configuration of the model."""
        return self.model.config


class ImageBlocks(NamedTuple):
    """ImageBlocks of images and videos in the tokens of a call, the arguments of `Stream.from_ids`."""

    types: Tensor
    images: Tensor | Sequence[Image] | None = None
    videos: Tensor | Sequence[Video] | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 (a NamedTuple; never changed)


@dataclass(frozen=True, eq=False)
class ImageRule:
    """A rule for the image placeholders of a family.

    Attributes:
        blocks: function from the tokens of a call to the blocks of its images and videos.
        text: how images are located, for the documentation.
        videos: how videos are located, for the documentation.
        needed: for images and videos that are encoded before the call, the argument with their sizes.
        fixed: whether images are squares of the configured size, so that nothing is needed.
        tiles: whether `tile_grids` may define tiles.
        pieces: number of blocks of an image.
        marked: whether types of the processor include the markers around images.
    """

    blocks: Callable[[CallTokens], ImageBlocks]
    text: str
    videos: str = "-"
    needed: Mapping[str, str] = field(default_factory=dict)
    fixed: Callable[[Any], bool] = lambda config: False
    tiles: bool = False
    pieces: int = 1
    marked: bool = False


@dataclass(frozen=True)
class LanguageFamily:
    """A family of models.

    Attributes:
        images: rule for the image placeholders.
        own: function from a configuration to the scheme that the model was trained with.
        separate_frames: whether the frames of a video are separate blocks, with timestamps as text between them.
        framed: whether video frames consist of image tokens, between markers of a video.
        first: position of the first token in the stock model.
        since: oldest supported version of transformers, if it is newer than that of other families.
        prefix_lm: whether all tokens of a prompt attend to each other, so that packed samples are refused.
        masks: whether the model around the language model creates masks itself, from ordinary position ids.
    """

    images: ImageRule
    own: Callable[[Any], Scheme] = lambda config: create_scheme("rope1d")
    separate_frames: bool = False
    framed: bool = False
    first: int = 0
    since: str = ""
    prefix_lm: bool = False
    masks: bool = False
