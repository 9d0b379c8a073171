"""Reference for converted models: the stock model with explicit angles, and decoding without optimisation."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import vispe
from tests.hosts.transformers.tiny import CACHE, QWEN, Batch, make
from vispe.multimodal import Scheme, create_scheme

HOST_SECTIONS = {"qwen2_vl": (8, 4, 4), "qwen2_5_vl": (6, 5, 5), "qwen3_vl": (6, 5, 5)}
HOST_SCHEME = {"qwen2_vl": "mrope", "qwen2_5_vl": "mrope", "qwen3_vl": "mrope_i"}


@functools.cache
def stock(family: str, kv_heads: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """Return a shared stock model, never modified."""
    return make(family, kv_heads).to(dtype)


def copy_of(family: str, kv_heads: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """Return a new model with the weights of `stock`."""
    model = copy.deepcopy(stock(family, kv_heads, dtype))
    if family in QWEN:
        model.model.rope_deltas = None  # what the stock keeps of calls before
    return model


@functools.cache
def converted(family: str, spec: str, kv_heads: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """Return a shared converted model, never modified."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of schemes that are not text-exact; tested on its own
        return vispe.convert(copy_of(family, kv_heads, dtype), named(spec, kv_heads))


def named(spec: str, kv_heads: int) -> str:
    """Return a spec with explicit heads of mhrope; these models have too few for the default assignment."""
    heads = {1: [0, 0, 1], 2: [1, 0, 1]}
    return f"mhrope(sections={heads[kv_heads]})" if spec == "mhrope" and kv_heads in heads else spec


def scheme_of(family: str, spec: str, kv_heads: int = 1) -> Scheme:
    """Return a scheme with the sections of the model, if it has any for this layout."""
    scheme = create_scheme(named(spec, kv_heads))
    if HOST_SCHEME.get(family) == scheme.name and scheme.options()["sections"] is None:
        return create_scheme(scheme, sections=HOST_SECTIONS[family])
    return scheme


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (c, c + d_h / 2) of x (b, h, s, d_h)."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@contextlib.contextmanager
def angles_of(model: Any, ids: Tensor, axis_of_pair: Tensor) -> Iterator[None]:
    """Make a stock model rotate queries and keys by these coordinates (axes, b, s) and ignore its position ids."""
    attention = model.model.language_model.layers[0].self_attn
    frequencies = model.model.language_model.rotary_emb.inv_freq.double()
    axes = axis_of_pair if axis_of_pair.ndim == 2 else axis_of_pair[None]
    angle = torch.zeros(ids.shape[1], len(axes), ids.shape[2], len(frequencies), dtype=torch.float64)
    for head, row in enumerate(axes.tolist()):
        for pair, axis in enumerate(row):
            if axis >= 0:
                angle[:, head, :, pair] = ids[axis] * frequencies[pair]

    def apply(q: Tensor, k: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        cos, sin = angle.float().cos().to(q), angle.float().sin().to(q)
        wide = [t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (cos, sin)]
        return rotated(q, *wide), rotated(k, cos, sin)

    module = sys.modules[type(attention).__module__]
    before = module.apply_rotary_pos_emb
    module.apply_rotary_pos_emb = apply
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = before


def wanted_logits(family: str, spec: str, batch: Batch, kv_heads: int = 1) -> Tensor:
    """Return the logits (b, s, v) of the stock model with the coordinates of an explicit stream."""
    scheme = scheme_of(family, spec, kv_heads)
    pairs = 16
    coordinates = scheme.coordinates(batch.stream)
    mask = batch.stream.mask.long()
    keys = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = batch.without("mm_token_type_ids", "attention_mask", "second_per_grid_ts")
    inputs["position_ids"] = keys.expand(4, -1, -1) if family in QWEN else keys
    model = stock(family, kv_heads)
    with torch.no_grad(), angles_of(model, coordinates.ids, scheme.allocation(pairs, kv_heads)):
        return model(**inputs, attention_mask=mask).logits


@torch.no_grad()
def recomputed(model: Any, batch: Batch, steps: int) -> tuple[Tensor, Tensor]:
    """Return tokens (b, steps) and logits (b, steps, v) of greedy decoding without a cache."""
    tokens, logits = batch["input_ids"][:, :0], []
    for _ in range(steps):
        out = model(**batch.with_tokens(tokens)).logits
        logits.append(last_valid(out, batch.with_tokens(tokens).get("attention_mask")))
        tokens = torch.cat([tokens, logits[-1].argmax(-1, keepdim=True)], 1)
    return tokens, torch.stack(logits, 1)


def last_valid(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return the logits (b, v) of the last token without padding of each row."""
    if mask is None:
        return logits[:, -1]
    last = torch.where(mask.bool(), torch.arange(mask.shape[1]), -1).amax(1)
    return logits[torch.arange(len(logits)), last]


@torch.no_grad()
def looped(
    model: Any, batch: Batch, steps: int, *, mask: bool = True, ids: bool = False, **first: Any
) -> tuple[Tensor, Tensor]:
    """Return tokens and logits of greedy decoding with a cache in an explicit loop.

    Args:
        model: the model.
        batch: the prompt.
        steps: number of tokens.
        mask: whether each step has the full mask.
        ids: whether each step has one-dimensional position ids.
        **first: further inputs for the prompt.
    """
    inputs = dict(batch.inputs) if mask else batch.without("attention_mask")
    recorded = batch.inputs.get("attention_mask", torch.ones_like(batch["input_ids"]))
    if ids:
        inputs["position_ids"] = (recorded.cumsum(1) - 1).masked_fill(recorded == 0, 0)
    out = model(**inputs, **first, use_cache=True)
    logits = [last_valid(out.logits, recorded)]
    tokens = logits[0].argmax(-1, keepdim=True)
    for _ in range(steps - 1):
        recorded = torch.cat([recorded, torch.ones_like(recorded[:, :1])], 1)
        arguments = {"attention_mask": recorded} if mask else {}
        if ids:
            arguments["position_ids"] = recorded.sum(1, keepdim=True) - 1
        out = model(input_ids=tokens[:, -1:], **{CACHE: out[CACHE]}, use_cache=True, **arguments)
        logits.append(out.logits[:, -1])
        tokens = torch.cat([tokens, logits[-1].argmax(-1, keepdim=True)], 1)
    return tokens, torch.stack(logits, 1)


def generated(model: Any, batch: Batch, steps: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Return tokens and logits of `generate`."""
    out = model.generate(
        **batch.inputs,
        max_new_tokens=steps,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return out.sequences[:, batch["input_ids"].shape[1] :], torch.stack(out.logits, 1)


def same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Assert the same tokens, and logits that agree to rounding."""
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-5)
