"""Both names of the cache, `cache` and, before transformers 5.24, `past_key_values`, give equal outputs."""

import inspect

import pytest
import torch

from tests.hosts.transformers.language.test_more_families import converted as more
from tests.hosts.transformers.more import CLASSES, prompt
from tests.hosts.transformers.reference import converted
from tests.hosts.transformers.tiny import CACHE, FAMILIES, batch, transformers

NAMES = ("cache", "past_key_values")
SAMPLE = ("gemma3", "glm4v", "qwen3_5")
both = pytest.mark.skipif(CACHE == "past_key_values", reason="one name before transformers 5.24")


def assert_equal_under_both(model, inputs):
    """Assert equal outputs for an empty cache under either name, and for a step after it."""
    config = model.config.get_text_config(decoder=True)
    actual = {}
    for name in NAMES:
        cache = transformers.DynamicCache(config=config)
        with torch.no_grad():
            first = model(**inputs, use_cache=True, **{name: cache})
            assert first[CACHE] is cache
            assert isinstance(cache, transformers.DynamicCache)
            step = model(input_ids=inputs["input_ids"][:, :1], **{name: cache})
        actual[name] = first.logits, step.logits
    assert all(map(torch.equal, *(actual[name] for name in NAMES)))


@pytest.mark.slow
@both
@pytest.mark.parametrize("family", FAMILIES)
def test_both_names(family):
    model, inputs = converted(family, "vrope"), batch(family, [3, "image", 4]).inputs
    assert_equal_under_both(model, inputs)
    with pytest.warns(FutureWarning, match="`past_key_values` is deprecated"):
        model(**inputs, past_key_values=transformers.DynamicCache(config=model.config.get_text_config()))


@both
@pytest.mark.parametrize(
    "family", [f if f in SAMPLE else pytest.param(f, marks=pytest.mark.slow) for f in CLASSES]
)
def test_both_names_in_other_families(family):
    model = more(family, "vrope")
    if CACHE not in inspect.signature(type(model).forward).parameters:
        pytest.skip("it takes no cache")
    assert_equal_under_both(model, prompt(family).inputs)
