"""Mixin of the converted model with a head: generation with the coordinates of the prompt."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from vispe.errors import InputError
from vispe.hosts.transformers.language.families import language_model_of
from vispe.hosts.transformers.language.parallel_sets import IDS
from vispe.hosts.transformers.language.positions.cache_checks import (
    check_conversion,
    check_end,
    check_filled_here,
)
from vispe.hosts.transformers.language.positions.call import GRIDS, PACKED, PIXELS, LanguageCall, passed
from vispe.hosts.transformers.language.positions.coordinates import table_by_index
from vispe.hosts.transformers.language.positions.kv_cache import state_after, text_state
from vispe.hosts.transformers.language.positions.prompt import CHUNKED, MASK, PROMPT, PromptPositions
from vispe.hosts.transformers.language.positions.sequence_state import SequenceState
from vispe.hosts.transformers.language.positions.token_index import check_mask, valid_tokens
from vispe.hosts.transformers.saving.peft_adapters import virtual_tokens
from vispe.hosts.transformers.version import CHUNKED_IMAGES, cache_of, check_version
from vispe.multimodal import Scheme


class PositionedGeneration:
    """The model with a head: generation starts with ordinary ids, and with the coordinates of the prompt."""

    def _prepare_position_ids_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]
    ) -> Tensor:
        from transformers import GenerationMixin

        token_index = GenerationMixin._prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs)  # type: ignore[arg-type]
        self._add_prompt_positions(inputs_tensor, token_index, model_kwargs)
        return token_index

    def _maybe_prepare_encoder_kwargs_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *rest: Any
    ) -> dict[str, Any]:
        """Compute the positions of a prompt with ids of the caller, before the host encodes images and drops sizes."""
        token_index, cache = model_kwargs.get("position_ids"), cache_of(model_kwargs)
        starts = cache is None or not cache.get_seq_length()
        raw = (
            starts
            and PROMPT not in model_kwargs
            and passed(model_kwargs, "pixel_values", "pixel_values_videos")
        )
        if raw and token_index is not None and token_index.ndim == 2:
            self._add_prompt_positions(inputs_tensor, token_index, model_kwargs)
        return super()._maybe_prepare_encoder_kwargs_for_generation(inputs_tensor, model_kwargs, *rest)  # type: ignore[misc]

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any, **more: Any
    ) -> Any:
        """Process the prompt, in chunks of `prefill_chunk_size` tokens if this is set.

        Raises:
            MissingExtra: this version of transformers drops the images of a prompt in chunks.
        """
        if generation_config.prefill_chunk_size is not None and passed(model_kwargs, *PIXELS):
            check_version(CHUNKED_IMAGES, "vispe: generate with prefill_chunk_size and images")
        mask = model_kwargs.get("attention_mask")
        cache = cache_of(model_kwargs)
        state: SequenceState | None = getattr(cache, "vispe_state", None)
        padded = isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all())
        if padded and state is not None and len(mask) == len(state.offset):
            cache.vispe_state = state.with_ended_rows(mask, int(cache.get_seq_length()))  # type: ignore[union-attr]
        if padded and getattr(cache, "is_compileable", False):
            chunked = generation_config.prefill_chunk_size is not None
            model_kwargs = {**model_kwargs, MASK: mask, CHUNKED: chunked}
        return super()._prefill(input_ids, generation_config, model_kwargs, *rest, **more)  # type: ignore[misc]

    def _add_prompt_positions(
        self, inputs_tensor: Tensor, token_index: Tensor, model_kwargs: dict[str, Any]
    ) -> None:
        """Add the table of coordinates of a prompt with images to the keyword arguments of generation."""
        if not passed(model_kwargs, *PIXELS, *GRIDS, IDS):
            return
        cache, mask = cache_of(model_kwargs), model_kwargs.get("attention_mask")
        state: SequenceState | None = getattr(cache, "vispe_state", None)
        if state is None:
            check_filled_here(cache)
        check_conversion(state, language_model_of(self.model).vispe_text.of_keys)  # type: ignore[attr-defined]
        check_end(state)
        if mask is not None and mask.ndim == 2:
            check_mask(mask, f"{type(self).__name__}.generate", PACKED)
        state = None if state is None else state.first_of_each(len(inputs_tensor))
        cached = 0 if state is None else int(cache.get_seq_length())  # type: ignore[union-attr]
        new = token_index.expand(len(inputs_tensor), -1)[:, cached:]
        # prompt tuning: text without input_ids precedes the prompt
        if state is None and (virtual := virtual_tokens(self)):
            new = new + virtual
            state = text_state(len(new), new.device)
        call = self._call_of(inputs_tensor, model_kwargs, cached, new.shape[1])
        # the grids may belong to images that are already in the cache
        if cached and not passed(model_kwargs, *PIXELS, IDS) and not call.types_of(new).any():
            return
        valid = valid_tokens(new, mask)
        coordinates, attributes = call.coordinates(new, valid, state)
        table, span = table_by_index(coordinates.ids, new, valid)
        of_sets = None if attributes is None else table_by_index(attributes, new, valid)[0]
        offset = state_after(coordinates, new, valid).offset
        model_kwargs[PROMPT] = PromptPositions(table, span, offset, of_sets)
        for name in ("tile_grids", IDS):
            model_kwargs.pop(name, None)

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *rest: Any, **more: Any
    ) -> dict[str, Any]:
        """Continue coordinates of the caller by the scheme; the host would add 1 on every axis."""
        position_ids = model_kwargs.get("position_ids")
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *rest, **more)  # type: ignore[misc]
        if position_ids is None or position_ids.ndim != 3:
            return updated
        scheme: Scheme = self.model.vispe_scheme  # type: ignore[attr-defined]
        ids, length = updated["position_ids"].clone(), position_ids.shape[-1]
        axes = ids[-scheme.axes :]
        steps = torch.arange(1, ids.shape[-1] - length + 1, device=ids.device)
        cache = cache_of(updated)
        state: SequenceState | None = getattr(cache, "vispe_state", None)
        check_end(state)
        if state is not None and int(cache.get_seq_length()) == length:
            # the last token may be padding, or part of an image
            steps = (length - 1 - state.padding)[:, None] + steps
            following = scheme.continue_text(steps, state.offset)
        else:
            last = axes[..., length - 1].double()
            counter = scheme.counter(last)
            text = scheme.continue_text(torch.zeros_like(steps[:1]), counter)[..., 0]
            if not torch.allclose(text, last, rtol=1e-6, atol=1e-6):
                raise InputError(
                    "generate: without a cache, position_ids that are coordinates (axes, b, s) must end with text, as "
                    "otherwise the next position is unknown, got an image. Add the text after it."
                )
            following = scheme.continue_text(steps, counter)
        axes[..., length:] = following.to(ids)
        return {**updated, "position_ids": ids}

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Repeat the rows of all arguments, for beams and several answers; the host repeats tensors only."""
        times = args[0] if args else kwargs.get("expand_size", 1)
        if times > 1 and (prompt := kwargs.get(PROMPT)) is not None:
            kwargs[PROMPT] = prompt.repeat(times)
        return super()._expand_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]

    def _call_of(
        self, inputs: Tensor, model_kwargs: dict[str, Any], cached: int, length: int
    ) -> LanguageCall:
        """Return the first call of generation, with the last `length` tokens."""
        ids, embeds = (inputs, None) if inputs.ndim == 2 else (None, inputs)
        if embeds is not None and (named := model_kwargs.get("input_ids")) is not None and named.shape[1]:
            ids = named
        types, mask = (model_kwargs.get(name) for name in ("mm_token_type_ids", "attention_mask"))
        return LanguageCall(
            self.model,  # type: ignore[attr-defined]
            None if ids is None else ids[:, -length:],
            None if embeds is None else embeds[:, -length:],
            None if types is None else types[:, cached:],
            mask,
            cache_of(model_kwargs),
            model_kwargs,
        )

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """Check the keyword arguments of generation, except those that only the converted model accepts."""
        super()._validate_model_kwargs({k: v for k, v in model_kwargs.items() if k != IDS})  # type: ignore[misc]

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Remove the positions of the prompt from the arguments of an assistant model, which computes its own."""
        kwargs["model_kwargs"] = {k: v for k, v in kwargs["model_kwargs"].items() if k != PROMPT}
        return super()._get_candidate_generator(*args, **kwargs)  # type: ignore[misc]


class PositionedGenerationFromOne(PositionedGeneration):
    """The model with a head, of a stock class that adds 1 to the positions of `generate`."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        """Prepare a step of generation, with positions that count from 0."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)  # type: ignore[misc]
        if inputs.get("position_ids") is not None:
            inputs["position_ids"] = inputs["position_ids"] - 1
        return inputs


# methods that the class of a model with a head overrides
GENERATION = tuple(name for name, value in vars(PositionedGeneration).items() if inspect.isfunction(value))
