"""What the classes of a converted vision-language model do differently: four small subclasses.

The model inside turns tokens and grids into coordinates, once per call, and hands them to its language model as
position ids; that turns them into cosines and sines for its layers. Nothing about a sequence is kept on a module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from vispe.attention.precision import float32_buffers, restore_buffers
from vispe.errors import InputError
from vispe.hosts.transformers.language import rope_in_attention
from vispe.hosts.transformers.language.call import (
    GRIDS,
    OFFSET,
    PACKED,
    PIXELS,
    SPAN,
    TABLE,
    Call,
    Placed,
    given,
    place,
    place_text,
)
from vispe.hosts.transformers.language.families import family_of, text_of
from vispe.hosts.transformers.language.kv_cache import (
    NextTokens,
    SequenceState,
    by_key,
    check_filled_here,
    check_mask,
    state_after,
    text_state,
    valid_tokens,
)
from vispe.hosts.transformers.language.pairwise_scores import Apart, extended, ordered, rates_of
from vispe.hosts.transformers.language.parallel_sets import IDS, MARKS, Beside, joined, seen
from vispe.hosts.transformers.language.position_assignment import (
    OWN,
    STEPS,
    Step,
    Waiting,
    call_of,
    keep,
    kept_class,
    open_cache,
    step_of,
    waits,
)
from vispe.hosts.transformers.language.position_ids import TokenPositions
from vispe.hosts.transformers.language.rope_in_attention import LATE, LateRotation
from vispe.hosts.transformers.language.rotary_detection import Rotary
from vispe.hosts.transformers.language.traced_positions import numbered
from vispe.hosts.transformers.packed_samples import (
    SAMPLES,
    Samples,
    flash_arguments,
    isolated,
    samples_of,
)
from vispe.hosts.transformers.saving.peft_adapters import virtual_tokens
from vispe.hosts.transformers.signature import by_name, like_stock, order_of, signed_like_stock
from vispe.hosts.transformers.version import CACHE_NAMES, cache_of
from vispe.multimodal import Scheme, tables

ROTATION = "vispe_rotation"  # cosines and sines, from the language model to its layers
PLACED = "vispe_placed"  # keys and coordinates, past a model that makes masks of its position ids


def buffer_of(kind: str) -> str:
    """Return the name of the buffer that has the axis of each pair in layers of a kind."""
    return f"vispe_axis_of_pair_{kind}" if kind else "vispe_axis_of_pair"


class PositionedGeneration:
    """The model with a head: it starts generation with ordinary ids, and with the coordinates of the prompt."""

    def _prepare_position_ids_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]
    ) -> Tensor:
        from transformers import GenerationMixin

        keys = GenerationMixin._prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs)  # type: ignore[arg-type]
        self._place_prompt(inputs_tensor, keys, model_kwargs)
        return keys

    def _maybe_prepare_encoder_kwargs_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *rest: Any
    ) -> dict[str, Any]:
        """Place the pictures of a prompt that has ids of its own: the host encodes them next and drops their sizes."""
        keys, cache = model_kwargs.get("position_ids"), cache_of(model_kwargs)
        begins = cache is None or not cache.get_seq_length()
        raw = (
            begins
            and TABLE not in model_kwargs
            and given(model_kwargs, "pixel_values", "pixel_values_videos")
        )
        if raw and keys is not None and keys.ndim == 2:
            self._place_prompt(inputs_tensor, keys, model_kwargs)
        return super()._maybe_prepare_encoder_kwargs_for_generation(inputs_tensor, model_kwargs, *rest)  # type: ignore[misc]

    def _place_prompt(self, inputs_tensor: Tensor, keys: Tensor, model_kwargs: dict[str, Any]) -> None:
        """Add the coordinates of a prompt with pictures, by key, to the arguments that generation hands on."""
        if not given(model_kwargs, *PIXELS, *GRIDS, IDS):
            return
        cache, mask = cache_of(model_kwargs), model_kwargs.get("attention_mask")
        state: SequenceState | None = getattr(cache, "vispe_state", None)
        if state is None:
            check_filled_here(cache)
        if mask is not None and mask.ndim == 2:
            check_mask(mask, f"{type(self).__name__}.generate", PACKED)
        seen = 0 if state is None else int(cache.get_seq_length())  # type: ignore[union-attr]
        new = keys.expand(len(inputs_tensor), -1)[:, seen:]
        if state is None and (virtual := virtual_tokens(self)):  # the prompt follows text without input_ids
            new = new + virtual
            state = text_state(len(new), new.device)
        call = self._call_of(inputs_tensor, model_kwargs, seen, new.shape[1])
        # grids of pictures that the cache holds already
        if seen and not given(model_kwargs, *PIXELS, IDS) and not call.types_of(new).any():
            return
        valid = valid_tokens(new, mask)
        coordinates = call.coordinates(new, valid, state)
        table, span = by_key(coordinates.ids, new, valid)
        model_kwargs.update({TABLE: table, SPAN: span, OFFSET: state_after(coordinates, new, valid).offset})
        if call.marks is not None:
            model_kwargs[MARKS] = by_key(call.marks, new, valid)[0]
        for name in ("tile_grids", IDS):
            model_kwargs.pop(name, None)

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *rest: Any, **more: Any
    ) -> dict[str, Any]:
        """Go on from coordinates that were given as the scheme does; the host adds 1 on every axis."""
        given = model_kwargs.get("position_ids")
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *rest, **more)  # type: ignore[misc]
        if given is None or given.ndim != 3:
            return updated
        scheme: Scheme = self.model.vispe_scheme  # type: ignore[attr-defined]
        every, length = updated["position_ids"].clone(), given.shape[-1]
        axes = every[-scheme.axes :]
        steps = torch.arange(1, every.shape[-1] - length + 1, device=every.device)
        axes[..., length:] = scheme.going_on(steps, scheme.counter(axes[..., length - 1].double())).to(every)
        return {**updated, "position_ids": every}

    def _call_of(self, inputs: Tensor, model_kwargs: dict[str, Any], seen: int, length: int) -> Call:
        """Return the call that generation starts with: the last tokens, `length` of them."""
        ids, embeds = (inputs, None) if inputs.ndim == 2 else (None, inputs)
        if embeds is not None and (named := model_kwargs.get("input_ids")) is not None and named.shape[1]:
            ids = named
        types, mask = (model_kwargs.get(name) for name in ("mm_token_type_ids", "attention_mask"))
        return Call(
            self.model,  # type: ignore[attr-defined]
            None if ids is None else ids[:, -length:],
            None if embeds is None else embeds[:, -length:],
            None if types is None else types[:, seen:],
            mask,
            cache_of(model_kwargs),
            model_kwargs,
        )

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """Check what generation was given; it does not know what the model inside takes beside."""
        super()._validate_model_kwargs({k: v for k, v in model_kwargs.items() if k != IDS})  # type: ignore[misc]

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the prompt by key from an assistant: it has its own model, and reads tokens and grids itself."""
        own = (TABLE, SPAN, OFFSET, MARKS)
        kwargs["model_kwargs"] = {k: v for k, v in kwargs["model_kwargs"].items() if k not in own}
        return super()._get_candidate_generator(*args, **kwargs)  # type: ignore[misc]


class PositionedModel:
    """The model inside: it knows the scheme."""

    vispe_scheme: Scheme
    vispe_number: int
    vispe_typed: ClassVar[bool] = False  # whether the model of before takes mm_token_type_ids
    vispe_cache: ClassVar[str]  # what it calls its cache
    vispe_order: ClassVar[tuple[str, ...]]  # its arguments by place

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copy, which compiled programs find by a number of its own."""
        super().__setstate__(state)  # type: ignore[misc]
        numbered(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the signature of the class that is replaced."""
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "vispe_stock"):
            more = dict.fromkeys(("mm_token_type_ids", "tile_grids", IDS), Tensor | None)
            signed_like_stock(cls, "forward", **more)
            stock = cls.vispe_stock.forward  # type: ignore[attr-defined]
            named = inspect.signature(stock).parameters
            cls.vispe_typed = "mm_token_type_ids" in named
            cls.vispe_cache = next(name for name in CACHE_NAMES if name in named)
            cls.vispe_order = order_of(stock)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with the coordinates of its scheme.

        Args:
            *args: arguments by place, as the model of before takes them.
            **kwargs: what the model of before takes, such as the cache of what came before, which remembers where the
                sequences stand. `position_ids` are ordinary ids (b, s), where one that does not go on by 1 starts a
                packed sample; or coordinates (axes, b, s), as `get_rope_index` gives them, or both (1 + axes, b, s).
                `mm_token_type_ids` (b, s), 0 text, 1 image, 2 video, are only read where there are no `input_ids`;
                without both, pictures are where `inputs_embeds` has the embedding of their token. Besides:
                `tile_grids`, rows and columns of the tiles of each image (n, 2), for models that cut images into tiles;
                and `parallel_ids` (b, s), the member of each token that stands side by side with others, -1 outside,
                for models converted with `parallel`.
        """
        named = by_name(f"{type(self).__qualname__}.forward", self.vispe_order, args, kwargs)
        call = call_of(self, named)
        kept = {name: named[name] for name in named if name not in OWN and name not in CACHE_NAMES}
        host = kept | {self.vispe_cache: call.cache}
        if not self.vispe_typed:
            host.pop("mm_token_type_ids", None)
        position_ids = named.get("position_ids")
        if (step := step_of(call, position_ids)) is not None:
            host["position_ids"] = step
            if family_of(self.config).masks:  # type: ignore[attr-defined]
                host[PLACED], host["position_ids"] = step, step.keys
            return super().forward(**host)  # type: ignore[misc]
        if waits(call, position_ids):
            waiting = Waiting(call, position_ids)
            try:
                return super().forward(**host | {"position_ids": waiting})  # type: ignore[misc]
            except Exception:
                if not waiting.tried:
                    waiting.place()  # what is wrong with the call is said before what the model says
                raise
        placed = place(call, position_ids)
        host["position_ids"] = _positions(placed)
        if family_of(self.config).masks:  # type: ignore[attr-defined]
            host[PLACED], host["position_ids"] = host["position_ids"], placed.keys
            if placed.packed:
                # image blocks are found by index, which ids that restart would hide from the host
                host[SAMPLES] = samples_of(placed.keys)
                host["position_ids"] = torch.arange(placed.keys.shape[1], device=placed.keys.device)[None]
        outputs = super().forward(**host)  # type: ignore[misc]
        keep(text_of(self), call.cache, outputs, placed)
        return outputs


def _positions(placed: Placed) -> TokenPositions:
    return TokenPositions(placed.keys, placed.ids, placed.marks)


class PositionedText:
    """The language model: it hands its layers the rotation of the scheme."""

    vispe_allocation: dict[str, list[Any]]  # of each kind of layers, what its buffer has, in plain numbers
    vispe_late: bool
    vispe_given_scheme: Scheme
    vispe_rotary: dict[str, Rotary]  # of each kind of layers
    vispe_beside: Beside | None
    vispe_extend: tuple[int, int] | None
    vispe_kept: ClassVar[
        type | None
    ]  # the class of a cache that it opens; None where the host opens another kind

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the signature of the class that is replaced."""
        super().__init_subclass__(**kwargs)
        like_stock(cls, "forward")
        if hasattr(cls, "vispe_stock"):
            cls.vispe_kept = kept_class(cls.vispe_stock)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast the model: frequencies stay in float32.

        The allocation is written again, as `to_empty` leaves buffers without values.
        """
        before = [(module, float32_buffers(module, "inv_freq")) for module in self.modules()]  # type: ignore[attr-defined]
        moved = super()._apply(fn, recurse)  # type: ignore[misc]
        for module, buffers in before:
            restore_buffers(module, buffers)
        self._fill()
        return moved

    def _init_weights(self, module: Any) -> None:
        """Initialise a module; of this one, what is no weight, as the host does for its own buffers."""
        super()._init_weights(module)  # type: ignore[misc]
        if module is self:
            self._fill()

    def _fill(self) -> None:
        """Write the allocations into their buffers."""
        for kind, axes in self.vispe_allocation.items():
            buffer: Tensor = getattr(self, buffer_of(kind))
            if not buffer.is_meta:
                buffer.copy_(torch.tensor(axes, device="cpu"))

    @property
    def vispe_scheme(self) -> Scheme:
        """The scheme; not an attribute, as the record of a conversion lists the modules that have one."""
        return self.vispe_given_scheme

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        """Run the model, on the positions that the model around it hands down, or alone.

        Args:
            *args: arguments by position, as the stock language model takes them.
            position_ids: `TokenPositions` or `Waiting` from the model around it. Called alone: ordinary ids (b, s), of
                text; coordinates (axes, b, s); both (1 + axes, b, s); or None for text that is counted from 0, or goes
                on after what is in the cache.
            **kwargs: what the stock language model takes.
        """
        tokens = [kwargs.get(name) for name in ("input_ids", "inputs_embeds")]
        if (tokens[0] is None) == (tokens[1] is None):
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # the host refuses both and neither
        if self.vispe_late:
            rope_in_attention.keep_on(self)
        positions, placed, cache = kwargs.pop(PLACED, position_ids), None, cache_of(kwargs)
        if isinstance(positions, Step):
            kwargs[ROTATION] = self._rotation_of_step(positions, kwargs["inputs_embeds"])
            return super().forward(*args, position_ids=self._host_ids(positions.keys), **kwargs)  # type: ignore[misc]
        # ids that are counted here do not restart, so every row is one sample
        asked = positions.position_ids if isinstance(positions, Waiting) else positions
        if not isinstance(positions, TokenPositions):
            waiting = isinstance(positions, Waiting)
            placed = positions.place() if waiting else place_text(call_of(self, kwargs), positions)
            positions, cache = _positions(placed), open_cache(self, kwargs)
        like = self.get_input_embeddings().weight if tokens[1] is None else tokens[1]  # type: ignore[attr-defined]
        positions = positions.to(like.device)
        keys, ids, marks = positions.keys, positions.coordinates, positions.marks
        state: SequenceState | None = getattr(cache, "vispe_state", None)
        samples = kwargs.pop(SAMPLES, None)
        if asked is not None and samples is None and state is None and kwargs.get("attention_mask") is None:
            samples = samples_of(keys)
        if samples is not None:
            kwargs.update(flash_arguments(self, samples))
            kwargs[SAMPLES] = samples
        made = {kind: self._turned(kind, ids, marks, state, like.dtype) for kind in self.vispe_rotary}
        rotation, late = ({kind: both[n] for kind, both in made.items()} for n in (0, 1))
        kwargs[ROTATION] = rotation.get("", rotation)
        if self.vispe_late:
            kwargs[LATE] = late.get("", late)
        outputs = super().forward(*args, position_ids=self._host_ids(keys), **kwargs)  # type: ignore[misc]
        if placed is not None:
            keep(self, cache, outputs, placed)
        return outputs

    def _host_ids(self, keys: Tensor) -> Tensor:
        """Return keys (b, s) in the rows of position ids that the stock class takes."""
        rows = next(iter(self.vispe_rotary.values())).rows
        return keys if rows == 1 else keys.expand(rows, *keys.shape)

    def _rotation_of_step(self, step: Step, embeds: Tensor) -> Any:
        """Return the cosines and sines of one text token for each kind of layers, computed for many at once."""
        known = step.upcoming()
        if known is None or any(
            cos.device != embeds.device or (cos.dtype != embeds.dtype and not self.vispe_rotary[kind].full)
            for kind, (cos, _) in known.rotation.items()
        ):
            # a cache may be used outside of inference mode later
            with torch.inference_mode(False), torch.no_grad():
                keys = step.keys + torch.arange(STEPS, device=step.keys.device)
                ids = step.scheme.going_on(keys, step.offset).to(embeds.device)
                made = {k: self._turned(k, ids, ids[:0], None, embeds.dtype)[0] for k in self.vispe_rotary}
            known = NextTokens(step.scheme, keys, step.offset, step.length, made)
            step.state.upcoming = known
        at = step.length - known.length
        rotation = {k: (c[:, at : at + 1], s[:, at : at + 1]) for k, (c, s) in known.rotation.items()}
        return rotation.get("", rotation)

    def _maybe_slice_kv_shared_inputs(
        self,
        hidden_states: Tensor,
        per_layer_inputs: Any,
        position_embeddings: Any,
        masks: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Take some tokens for layers that share keys (Gemma 4): with them, their part of rotation and masks."""
        samples: Samples | None = kwargs.get(SAMPLES)
        if samples is not None:
            kinds, cache, dtype = self.config.layer_types, cache_of(kwargs), hidden_states.dtype  # type: ignore[attr-defined]
            layers = {kind: self.layers[kinds.index(kind)] for kind in masks}  # type: ignore[attr-defined]
            masks = {
                kind: isolated(mask, samples, layers[kind], cache, dtype) for kind, mask in masks.items()
            }
        given = hidden_states, per_layer_inputs, kwargs.get(ROTATION, position_embeddings), masks, *args
        return super()._maybe_slice_kv_shared_inputs(*given, **kwargs)  # type: ignore[misc]

    def _turned(
        self, kind: str, ids: Tensor, marks: Tensor | None, state: SequenceState | None, dtype: torch.dtype
    ) -> tuple[tuple[Tensor, Tensor], LateRotation | None]:
        """Return what layers of a kind turn by, and what their attention does; in its place where that turns."""
        own = self.vispe_rotary[kind]
        pairs = {"frequencies": own.rates(self), "axis_of_pair": getattr(self, buffer_of(kind))}
        factor, dtype = own.scaling(self), torch.float32 if own.full else dtype
        turned = partial(tables, **pairs, scaling=factor, dtype=dtype)
        cos, sin = turned(ids)
        if not self.vispe_late:
            return (own.wide(cos), own.wide(sin)), None
        past = None if state is None else state.ids
        every = (cos, sin) if past is None else turned(torch.cat([past, ids], 2))
        apart = self._apart(ids, marks, state, factor, **pairs)
        late = LateRotation(_with_heads(cos, sin), _with_heads(*every), *apart, own.layout)
        still = (1, 1, 2 * own.pairs)
        return (cos.new_ones(still), cos.new_zeros(still)), late  # the host turns nothing

    def _apart(
        self,
        ids: Tensor,
        marks: Tensor | None,
        state: SequenceState | None,
        factor: float,
        frequencies: Tensor,
        axis_of_pair: Tensor,
    ) -> tuple[Tensor | None, Apart | None]:
        """Return the mask of tokens that stand side by side, and how logits are made other than by one rotation."""
        every = ids if state is None or state.ids is None else torch.cat([state.ids, ids], 2)
        at = ids.movedim(0, -1), every.movedim(0, -1), rates_of(frequencies, axis_of_pair, len(ids))
        if self.vispe_extend is not None:
            return None, extended(*at, factor, *self.vispe_extend)
        if marks is None:
            return None, None
        marks = joined(None if state is None else state.marks, marks)
        mask = seen(marks, ids.shape[2])
        return mask, ordered(*at, factor, marks) if self.vispe_beside == "pine" else None


def _with_heads(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return (cos, sin) if cos.ndim == 4 else (cos[:, None], sin[:, None])


class PositionedLayer:
    """A decoder layer: it turns queries and keys by what the language model hands down."""

    vispe_kind: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the signature of the class that is replaced; checkpointing goes around all of it, so it comes last."""
        like_stock(cls, "forward")
        super().__init_subclass__(**kwargs)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with the rotation that the language model hands down.

        Called alone, with the rotation in `position_embeddings`, as the stock layer.

        Raises:
            InputError: there is neither; or there is a cache whose keys have no rotation.
        """
        rotation, late = kwargs.pop(ROTATION, None), kwargs.get(LATE)
        if rotation is None:
            self._check_alone(kwargs)
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        samples: Samples | None = kwargs.pop(SAMPLES, None)
        # layers that share keys may be given the last tokens only, and masks of these; Gemma 3n stacks its inputs
        if samples is not None and samples.number.shape[1] == hidden_states.shape[-2]:
            kwargs["attention_mask"] = isolated(
                kwargs.get("attention_mask"), samples, self, cache_of(kwargs), hidden_states.dtype
            )
        if isinstance(rotation, dict):
            given, rotation = kwargs["position_embeddings"], rotation[self.vispe_kind]
            # layers that share keys may be given some tokens only, and with them the rotation of these
            rotation = given if given[0].shape[1] < rotation[0].shape[1] else rotation
        kwargs["position_embeddings"] = rotation
        if isinstance(late, dict):
            kwargs[LATE] = late[self.vispe_kind]
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]

    def _check_alone(self, kwargs: dict[str, Any]) -> None:
        """Raise `InputError` where a call of the layer alone lacks its rotation, or has the wrong cache for it."""
        if kwargs.get("position_embeddings") is None:
            raise InputError(
                f"{type(self).__qualname__}: position_embeddings are missing, got None. Give the cosines and sines "
                "that the rotary embedding of the language model returns, or call the language model."
            )
        state: SequenceState | None = getattr(cache_of(kwargs), "vispe_state", None)
        if state is not None and state.ids is not None:
            raise InputError(
                f"{type(self).__qualname__}: the cache holds keys without rotation, which only the attention of the "
                "language model rotates, got a layer called alone. Call the language model, or leave the cache out."
            )
