"""Visual tokens at (position, row, column), with rows and columns counted from 0 (IL-RoPE, OmniRoPE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vispe.errors import OptionError
from vispe.multimodal.registry import register_scheme
from vispe.multimodal.schemes.mrope import MRoPE, MRoPEInterleaved


def _check_reset(name: str, reset: bool, plain: str) -> None:
    if reset is not True:
        raise OptionError(
            f"{name} always counts rows and columns from 0, got spatial_reset={reset!r}. Use {plain}."
        )


@register_scheme
@dataclass(frozen=True)
class OmniRoPE(MRoPE):
    """MRoPE with rows and columns of every visual segment counted from 0, in chunks of channels (OmniGen2).

    Options are those of `MRoPE`; `spatial_reset` is always true. The paper has text at (t, 0, 0),
    ``text_axes='time'``; with the default ``'all'``, that of public code for language models, text is unchanged.
    """

    name: ClassVar[str] = "omnirope"
    summary: ClassVar[str] = "MRoPE with rows and columns of every visual segment counted from 0 (OmniGen2)."
    paper: ClassVar[str] = "OmniGen2, https://arxiv.org/abs/2506.18871"

    spatial_reset: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_reset(self.name, self.spatial_reset, "mrope")


@register_scheme
@dataclass(frozen=True)
class ILRoPE(MRoPEInterleaved):
    """MRoPE-I with rows and columns of every visual segment counted from 0 (Mogao).

    Options are those of `MRoPE`; `spatial_reset` is always true, `sections` are 24, 20, 20 of 64 by default. The paper
    has text at (t, 0, 0), ``text_axes='time'``; with the default ``'all'``, text is unchanged.
    """

    name: ClassVar[str] = "ilrope"
    summary: ClassVar[str] = "MRoPE-I with rows and columns of every visual segment counted from 0 (Mogao)."
    paper: ClassVar[str] = "Mogao, https://arxiv.org/abs/2505.05472"

    spatial_reset: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_reset(self.name, self.spatial_reset, "mrope_i")
