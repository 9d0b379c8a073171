"""The language model of a converted model, and its layers, called directly: text is exact, other inputs raise."""

import contextlib
import copy
import functools
import warnings

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers import more, tiny
from tests.hosts.transformers.language.test_more_families import converted as converted_more
from tests.hosts.transformers.reference import converted as converted_first
from tests.hosts.transformers.reference import copy_of
from tests.hosts.transformers.reference import stock as stock_first
from tests.hosts.transformers.tiny import CACHE, batch
from tests.products import partly
from vispe.errors import InputError, UnsupportedHost
from vispe.hosts.transformers.language.families import language_model_of
from vispe.hosts.transformers.language.positions.position_ids import TokenPositions

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FAMILIES = (*tiny.CLASSES, *more.CLASSES)
EMBEDDED = [f for f in FAMILIES if f not in ("gemma3n",)]  # whose inputs by layer are made of tokens


def stock(family):
    return stock_first(family) if family in tiny.CLASSES else more.stock(family)


@functools.cache
def converted(family, spec, late=False):
    options = {"late_rotation": True} if late else {}
    if family in tiny.CLASSES and not late:
        return converted_first(family, spec)
    if family in tiny.CLASSES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return vispe.convert(copy_of(family), spec, **options)
    return converted_more(family, spec, **options)


def tokens(rows, length):
    return torch.randint(1, 200, (rows, length), generator=torch.Generator().manual_seed(rows))


def calls(text, rows, length):
    """Yield the inputs of a language model: tokens or embeddings, with and without ids, masks and a cache."""
    ids = tokens(rows, length)
    offset = torch.arange(length) + 3 * torch.arange(rows)[:, None]
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :2] = 0
    for use in (True, False):
        yield {"input_ids": ids, "use_cache": use}
        yield {"input_ids": ids, "position_ids": offset, "use_cache": use}
    yield {"input_ids": ids, "position_ids": offset[:1]}
    yield {"input_ids": ids, "attention_mask": mask}
    yield {"inputs_embeds": text.get_input_embeddings()(ids).detach()}


@partly(0.15)
@cases(("rows", "length"), [(2, 7), (4, 3), (5, 2)])
@cases("family", FAMILIES)
@torch.no_grad()
def test_text_equals_the_stock_model(family, rows, length):
    """Includes a batch with as many rows as axes, and as many tokens as heads."""
    before, text = (language_model_of(m.model) for m in (stock(family), converted(family, "mrope_i")))
    for sample in calls(before, rows, length):
        if "inputs_embeds" in sample and family not in EMBEDDED:
            continue
        if "position_ids" in sample and family == "minimax_m3_vl":
            continue  # indexers of the stock model take ids for indices of keys
        expected, actual = before(**sample), text(**sample)
        # a model that counts from 1 does so in its language model as well, which counts from 0 by itself
        atol = 1e-4 if family == "paligemma" else 0
        torch.testing.assert_close(actual.last_hidden_state, expected.last_hidden_state, rtol=0, atol=atol)
        if sample.get("use_cache") and "position_ids" not in sample and expected.get(CACHE) is not None:
            step = {"input_ids": tokens(rows, 1)}
            expected = before(**step, **{CACHE: expected[CACHE]}).last_hidden_state
            actual = text(**step, **{CACHE: actual[CACHE]}).last_hidden_state
            torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@partly(1)
@cases(("spec", "late"), [("vrope", False), ("v2pe", False), ("mrope_i", True)])
@cases("family", ["qwen2_5_vl", "llava", "glm4v", "ernie4_5_vl_moe", "qwen3_5", "smolvlm"])
@torch.no_grad()
def test_coordinates_equal_those_of_the_complete_model(family, spec, late):
    if late and family == "qwen3_5":
        return
    model = converted(family, spec, late)
    text, axes = language_model_of(model.model), model.model.vispe_scheme.axes
    ids, keys = tokens(2, 7), torch.arange(7).expand(1, 2, 7)
    where = torch.cumsum(torch.rand(axes, 2, 7, dtype=torch.float64), 2)
    for position_ids in (where, torch.cat([keys.double(), where])):
        expected = model.model(input_ids=ids, position_ids=position_ids).last_hidden_state
        out = text(input_ids=ids, position_ids=position_ids, use_cache=True)
        assert torch.equal(out.last_hidden_state, expected)
        through = model.model(input_ids=ids, position_ids=position_ids, use_cache=True)
        steps = [
            m(input_ids=ids[:, :2], **{CACHE: o[CACHE]}) for m, o in ((text, out), (model.model, through))
        ]
        assert torch.equal(*(s.last_hidden_state for s in steps))
    expected = model.model(input_ids=ids).last_hidden_state
    assert torch.equal(text(input_ids=ids).last_hidden_state, expected)
    assert torch.equal(text(inputs_embeds=text.get_input_embeddings()(ids)).last_hidden_state, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava"])
@torch.no_grad()
def test_text_after_an_image_in_the_cache(family):
    model, sample = converted(family, "vrope"), batch(family, [3, "image", 4], [7])
    caches = [model(**sample.inputs, use_cache=True)[CACHE] for _ in range(2)]
    step = {"input_ids": tokens(2, 2)}
    step["attention_mask"] = torch.cat([sample["attention_mask"], torch.ones_like(step["input_ids"])], 1)
    actual, expected = (
        m(**step, **{CACHE: c})
        for m, c in zip((language_model_of(model.model), model.model), caches, strict=True)
    )
    assert torch.equal(actual.last_hidden_state, expected.last_hidden_state)


def recorded(text, ids):
    """Return the arguments and the output of each layer of a stock language model."""
    visible, hooks = [], []
    for layer in text.layers:
        keep = functools.partial(
            lambda n, _, args, kwargs, out: visible.append((n, args, kwargs, out)), len(hooks)
        )
        hooks.append(layer.register_forward_hook(keep, with_kwargs=True))
    text(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return visible


@partly(16)
@cases("family", FAMILIES)
@torch.no_grad()
def test_layers_equal_the_stock_model(family):
    before = language_model_of(stock(family).model)
    models = [converted(family, "mrope_i")]
    with contextlib.suppress(UnsupportedHost):
        models.append(converted(family, "mrope_i", True))
    for number, args, kwargs, expected in recorded(before, tokens(2, 5)):
        for model in models:
            layer = language_model_of(model.model).layers[number]
            remaining = {k: v for k, v in kwargs.items() if k != "shared_kv_states"}
            more_kept = (
                {"shared_kv_states": dict(kwargs["shared_kv_states"])} if "shared_kv_states" in kwargs else {}
            )
            actual = layer(*args, **remaining, **more_kept)
            actual_layer, expected_layer = (x if torch.is_tensor(x) else x[0] for x in (actual, expected))
            assert torch.equal(actual_layer, expected_layer)
            if remaining.get("position_embeddings") is not None:
                with pytest.raises(InputError, match="position_embeddings are missing"):
                    layer(*args, **remaining | {"position_embeddings": None}, **more_kept)


@torch.no_grad()
def test_a_single_layer_rejects_a_cache_without_rotation():
    model = converted("llava", "mrope_i", True)
    text, ids = language_model_of(model.model), tokens(1, 4)
    _, args, kwargs, _ = recorded(language_model_of(stock("llava").model), ids)[0]
    cache = text(input_ids=ids, use_cache=True)[CACHE]
    with pytest.raises(InputError, match="the cache contains unrotated keys"):
        text.layers[0](*args, **kwargs | {CACHE: cache})


@cases("family", ["qwen2_vl", "llava"])
def test_tokens_and_embeddings_are_exclusive(family):
    text = language_model_of(converted(family, "mrope_i").model)
    for sample in ({}, {"input_ids": tokens(1, 3), "inputs_embeds": torch.zeros(1, 3, 64)}):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            text(**sample)


def test_checkpointing_does_not_change_gradients():
    text = copy.deepcopy(language_model_of(converted("qwen2_5_vl", "mrope_i").model)).train()
    actual = []
    for reentrant in (None, False, True):
        text.zero_grad()
        if reentrant is not None:
            text.gradient_checkpointing_enable({"use_reentrant": reentrant})
        embeds = torch.randn(2, 5, text.config.hidden_size, generator=torch.Generator().manual_seed(1))
        out = text(inputs_embeds=embeds.requires_grad_()).last_hidden_state
        (out * out.detach().cos()).sum().backward()
        actual.append([w.grad.clone() for w in text.parameters() if w.grad is not None])
    assert all(torch.equal(a, b) for other in actual[1:] for a, b in zip(actual[0], other, strict=True))


@torch.no_grad()
def test_wrappers_do_not_cast_positions():
    """FSDP with mixed precision casts tensors, tuples, dictionaries and dataclasses among the inputs."""
    from torch.distributed.utils import _apply_to_tensors

    ids = torch.rand(3, 1, 4, dtype=torch.float64) + 1e4
    sample = {"position_ids": TokenPositions(torch.arange(4)[None], ids)}

    def half(x):
        return x.bfloat16().to(x) if x.is_floating_point() else x

    cast = _apply_to_tensors(half, sample)
    assert torch.equal(cast["position_ids"].coordinates, ids)
    model, sequence = copy.deepcopy(converted("qwen2_vl", "mrope_i")), torch.arange(1, 300)[None]
    expected = model(input_ids=sequence).logits
    model.model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, _apply_to_tensors(half, kwargs)), with_kwargs=True
    )
    actual = model(input_ids=sequence).logits
    assert (actual - expected).abs().max() < 0.05 * expected.abs().max()  # embeddings are cast
