"""What others ask a Qwen model for: position ids of a batch before the call, as collators and serving code do."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.hosts.transformers.language.call import Call
from vispe.hosts.transformers.language.converted_classes import PositionedGeneration, PositionedModel
from vispe.hosts.transformers.language.kv_cache import (
    SequenceState,
    check_filled_here,
    check_mask,
    next_keys,
    prompt_keys,
    text_coordinates,
    valid_tokens,
)
from vispe.hosts.transformers.signature import like_stock
from vispe.multimodal import Coordinates, create_scheme
from vispe.multimodal.properties import is_whole

INDEX = ("get_rope_index", "compute_3d_position_ids")


class PositionedIndexGeneration(PositionedGeneration):
    """The model with a head that answers for the ids of its model itself (Qwen-Omni)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the signature of the class that is replaced."""
        super().__init_subclass__(**kwargs)
        like_stock(cls, "get_rope_index")

    def get_rope_index(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return what the model inside does."""
        return self.model.get_rope_index(*args, **kwargs)  # type: ignore[attr-defined]


class PositionedIndex(PositionedModel):
    """The model inside, of the families with `get_rope_index`: it gives the ids of its scheme in that form."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the signatures of the class that is replaced; they differ from family to family."""
        super().__init_subclass__(**kwargs)
        like_stock(cls, *INDEX)

    def get_rope_index(
        self,
        input_ids: Tensor,
        mm_token_type_ids: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        attention_mask: Tensor | None = None,
        second_per_grid_ts: Any = None,
        second_per_grids: Any = None,
        use_audio_in_video: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the coordinates of a batch, to be given as `position_ids`, and the delta of each row.

        Args:
            input_ids: tokens (b, s).
            mm_token_type_ids: (b, s); not read, as `input_ids` say the same.
            image_grid_thw: grids (n, 3) of frames, rows, columns.
            video_grid_thw: the same of videos.
            attention_mask: (b, s), 0 where there is padding.
            second_per_grid_ts: seconds from frame to frame of each video.
            second_per_grids: the same, as Qwen-Omni calls it.
            use_audio_in_video: refused where there are videos.

        Returns:
            ids (axes, b, s), 0 where there is padding, and what is added to the number of a token to get its position
            once all is text (b, 1). Both have the dtype of `input_ids` where all coordinates of the scheme are whole
            numbers, else float64: a cast to half precision would move tokens, and is refused by the model.

        Raises:
            InputError: placeholders and grids do not agree, or the mask numbers packed samples.
        """
        check_mask(
            attention_mask, "get_rope_index", "get the ids of the samples one by one and concatenate them."
        )
        mask = None if attention_mask is None else attention_mask.bool()
        grids: dict[str, Any] = {"image_grid_thw": image_grid_thw, "video_grid_thw": video_grid_thw}
        seconds = second_per_grids if second_per_grid_ts is None else second_per_grid_ts
        grids |= {"second_per_grid_ts": seconds, "use_audio_in_video": use_audio_in_video}
        coordinates = self._indexed(input_ids, mask, grids)
        delta = coordinates.delta()
        kind = input_ids.dtype if _whole(str(self.vispe_scheme)) else torch.float64
        return coordinates.ids.to(kind), delta.to(kind)

    def compute_3d_position_ids(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        mm_token_type_ids: Tensor | None = None,
        second_per_grid_ts: Any = None,
        video_second_per_grid: Any = None,
        use_audio_in_video: bool | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Tensor | None:
        """Return the coordinates (axes, b, s) that a call with these arguments would use; None for a prompt of text.

        Nothing is kept on the model: tokens after a cache are placed by what the cache remembers.
        """
        # the name of before 5.24
        past = past_key_values if cache is None else cache
        state: SequenceState | None = getattr(past, "vispe_state", None)
        if state is None:
            check_filled_here(past)
            if input_ids is None or (image_grid_thw is None and video_grid_thw is None):
                return None
            return self.get_rope_index(
                input_ids,
                image_grid_thw=image_grid_thw,
                video_grid_thw=video_grid_thw,
                attention_mask=attention_mask,
                second_per_grid_ts=second_per_grid_ts,
                second_per_grids=video_second_per_grid,
                use_audio_in_video=bool(use_audio_in_video),
            )[0]
        tokens = inputs_embeds if input_ids is None else input_ids
        keys = next_keys(tokens.shape[1], past, state, attention_mask)  # type: ignore[union-attr]
        return text_coordinates(self.vispe_scheme, keys, state)

    @property
    def rope_deltas(self) -> None:
        """None: where a sequence goes on is kept with its cache; `get_rope_index` returns the number of each row."""
        return None

    @rope_deltas.setter
    def rope_deltas(self, deltas: Tensor | None) -> None:
        if deltas is not None:
            raise InputError(
                "rope_deltas was set on a converted model, which does not read it. If this came from generate(), only "
                "the model inside was converted: call vispe.convert with the whole model, head included."
            )

    def _indexed(self, input_ids: Tensor, mask: Tensor | None, grids: dict[str, Any]) -> Coordinates:
        """Return the coordinates of a batch from its start."""
        keys = prompt_keys(input_ids.shape[1], len(input_ids), mask, input_ids.device)
        call = Call(self, input_ids, None, None, mask, None, grids)
        return call.coordinates(keys, valid_tokens(keys, mask), None)


@cache
def _whole(spec: str) -> bool:
    return is_whole(create_scheme(spec))
