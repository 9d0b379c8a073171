"""One call of a converted model: its arguments, and the stream of text, images and videos that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError, VispeError
from vispe.hosts.transformers.language.families import language_model_of
from vispe.hosts.transformers.language.image_placeholders import stream_of, token_types, types_by_embedding
from vispe.hosts.transformers.language.parallel_sets import IDS, RULES, members_of, token_attributes_of
from vispe.hosts.transformers.language.positions import traced_positions
from vispe.hosts.transformers.language.positions.prompt import PROMPT, PromptPositions
from vispe.hosts.transformers.language.positions.sequence_state import SequenceState
from vispe.hosts.transformers.language.positions.token_index import documents
from vispe.multimodal import Coordinates, Scheme, Stream
from vispe.multimodal.concatenated_scheme import ConcatenatedScheme

# part of error messages: advice for packed samples
PACKED = "pass position_ids (b, s) that restart at 0 in every sample, as those of vispe.train.vlm.packing.Packing do."
# Video-LLaVA accepts images by another name as well, its only name before transformers 5.24
PIXELS = ("pixel_values", "pixel_values_images", "pixel_values_videos", "mm_encoder_outputs")
# seconds between frames belong to a grid of videos; generate passes them to an assistant model, which gets no grids
GRIDS = ("image_grid_thw", "video_grid_thw", "tile_grids")


def passed(kwargs: dict[str, Any], *names: str) -> list[str]:
    """Return the names of arguments that are not empty; `generate` passes an empty dict without images."""
    values = ((name, kwargs.get(name)) for name in names)
    return [name for name, v in values if v is not None and not (isinstance(v, dict) and not v)]


@dataclass(eq=False)
class LanguageCall:
    """Arguments of a call that determine the positions of its tokens.

    Attributes:
        model: the converted model inside.
        input_ids: (b, s), or None.
        inputs_embeds: (b, s, width), or None.
        types: token types (b, s), or None; used if there are no `input_ids`.
        mask: padding mask (b, all tokens so far), or None.
        cache: KV cache, or None.
        kwargs: the other keyword arguments.
        masked: whether there is a mask of any kind, including 4-D masks.
    """

    model: Any
    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    types: Tensor | None
    mask: Tensor | None
    cache: Any
    kwargs: dict[str, Any]
    masked: bool = False

    def __post_init__(self) -> None:
        if self.input_ids is None and self.inputs_embeds is None:
            raise InputError("The model needs input_ids or inputs_embeds, got neither.")

    @property
    def tokens(self) -> Tensor:
        """The tokens: `input_ids` (b, s), or embeddings (b, s, width)."""
        return self.inputs_embeds if self.input_ids is None else self.input_ids  # type: ignore[return-value]

    @property
    def state(self) -> SequenceState | None:
        """The state of the KV cache before the call."""
        return getattr(self.cache, "vispe_state", None)

    def state_by_mask(self, position_ids: Tensor | None) -> SequenceState | None:
        """Return the state of the KV cache, without cached text that the mask of this call excludes."""
        state, length = self.state, self.tokens.shape[1]
        # steps of generate, which pass position ids, exclude nothing
        if state is None or self.mask is None or torch.compiler.is_compiling():
            return state
        if length == 1 and position_ids is not None:
            return state
        cached = int(self.cache.get_seq_length())
        return state.with_ended_rows(self.mask, cached) if self.mask.shape[1] == cached + length else state

    @property
    def prompt(self) -> PromptPositions | None:
        """The coordinates of the prompt, in calls of `generate`."""
        return self.kwargs.get(PROMPT)

    @property
    def has_images(self) -> bool:
        """Whether the call may contain images, videos or parallel sets."""
        # grids are passed in every step of generation, also if their images are cached
        sizes = GRIDS if self.state is None else ()
        return bool(passed(self.kwargs, *PIXELS, *sizes, IDS)) or (
            self.input_ids is None and self.types is not None
        )

    def types_of(self, token_index: Tensor) -> Tensor:
        """Return the type of every token (b, s): 0 text, 1 image, 2 video.

        Raises:
            InputError: there are images or videos, but their tokens cannot be determined.
        """
        shape = (token_index.shape[0], token_index.shape[1])
        types = token_types(self.model.config, self.input_ids, self.types, shape)
        if types is None and self.inputs_embeds is not None:
            types = types_by_embedding(self.model, self.inputs_embeds)
            if (named := passed(self.kwargs, *PIXELS, *GRIDS)) and not bool(types.any()):
                raise InputError(
                    f"The image tokens of inputs_embeds cannot be determined, got {named[0]} without "
                    "mm_token_type_ids, and no token with the embedding of an image token. Pass these types (b, s)."
                )
        return torch.zeros_like(token_index) if types is None else types

    def visual_tokens(self, token_index: Tensor) -> Tensor | None:
        """Return which tokens are those of images and videos (b, s); None if there are none, or if it is unknown."""
        if not self.has_images and self.prompt is None:
            return None
        if self.input_ids is None and torch.compiler.is_compiling():
            return None  # the comparison of embeddings needs values
        try:
            return self.types_of(token_index) != 0
        except VispeError:
            return None

    def stream(self, token_index: Tensor, valid: Tensor) -> Stream:
        """Return the stream of text, images and videos of tokens (b, s).

        Raises:
            InputError: grids and placeholders differ.
        """
        arguments = (
            self.model,
            self.types_of(token_index),
            valid,
            documents(token_index, valid),
            self.kwargs,
        )
        parallel: str | None = language_model_of(self.model).vispe_text.parallel
        if parallel is None:
            return stream_of(*arguments)
        members: Tensor | None = self.kwargs.get(IDS)
        if members is None:
            members = members_of(self.model.config, self.input_ids, stream_of(*arguments))
        see, align = RULES[parallel]
        return stream_of(*arguments, members=members, see=see, align=align)

    def start(self, token_index: Tensor, valid: Tensor, state: SequenceState | None) -> Tensor | None:
        """Return the counter of the scheme before the first token, (b) or (b, k); None for new sequences."""
        if state is None:
            return None
        first = torch.where(valid, token_index, token_index.max()).amin(1)
        first = torch.where(valid.any(1), first, 0)  # rows without new tokens continue from the offset itself
        return self.model.vispe_scheme.counter_after(state.offset, first)

    def coordinates(
        self, token_index: Tensor, valid: Tensor, state: SequenceState | None
    ) -> tuple[Coordinates, Tensor | None]:
        """Return the coordinates of tokens (b, s) that may contain images and videos.

        Returns:
            the coordinates, and the attributes of parallel sets (k, b, s), None without sets.
        """
        scheme, start = self.model.vispe_scheme, self.start(token_index, valid, state)
        shift = self.shift(state)
        if shift is not None and start is not None:
            coordinates, attributes = self._from(token_index, valid, scheme.counter_after(start, -shift))
            return _shifted(coordinates, shift), attributes
        return self._from(token_index, valid, start)

    def shift(self, state: SequenceState | None) -> Tensor | None:
        """Return the position of the first token of each row (b), if padding before it has positions; None for 0.

        Text before the first image has the positions of the stock model, which count padding.
        """
        if state is None or _all_follow_text(self.model.vispe_scheme):
            return None
        if state.shift is not None or state.by_mask or self.mask is None:
            return state.shift
        cached = self.mask.shape[1] - self.tokens.shape[1]
        return (self.mask[:, :cached].cumsum(1) == 0).sum(1)

    def _from(
        self, token_index: Tensor, valid: Tensor, start: Tensor | None
    ) -> tuple[Coordinates, Tensor | None]:
        """Return what `coordinates` returns, from a counter before the first token."""
        scheme = self.model.vispe_scheme
        if language_model_of(self.model).vispe_text.parallel is None and traced_positions.traceable(
            self.model, self.kwargs
        ):
            tensors = (self.input_ids, self.inputs_embeds, self.types, token_index, valid, start)
            return traced_positions.coordinates(self.model, tensors, self.kwargs), None
        stream = self.stream(token_index, valid)
        coordinates = scheme.coordinates(stream, start=start, training=self.model.training)
        return coordinates, token_attributes_of(scheme, stream, coordinates)


def _all_follow_text(scheme: Scheme) -> bool:
    """Return whether all coordinates of images move with the text before them."""
    parts = scheme.layers.schemes if isinstance(scheme, ConcatenatedScheme) else (scheme,)
    return all(all(part.follows_text) for part in parts)


def _shifted(coordinates: Coordinates, shift: Tensor) -> Coordinates:
    """Return coordinates moved by `shift` text tokens (b) on the axes of text, also in images."""
    scheme, zero = coordinates.scheme, torch.zeros_like(shift, dtype=torch.float64)
    by = scheme.continue_text(shift[:, None], zero) - scheme.continue_text(
        torch.zeros_like(shift)[:, None], zero
    )
    ids = torch.where(coordinates.mask, coordinates.ids + by, coordinates.ids)
    return replace(coordinates, ids=ids, next=scheme.counter_after(coordinates.next, shift))


@traced_positions.runs
def _untraced(model: Any, tensors: Sequence[Tensor | None], kwargs: dict[str, Any]) -> Coordinates:
    """Return the coordinates of a call, from the arguments of the custom operator in `traced_positions`."""
    ids, embeds, types, token_index, valid, start = tensors
    if token_index is None or valid is None:
        raise InputError(
            "The coordinates of a prompt need token indices and a mask of valid tokens, got None."
        )
    call = LanguageCall(model, ids, embeds, types, None, None, kwargs)
    return model.vispe_scheme.coordinates(call.stream(token_index, valid), start=start)
