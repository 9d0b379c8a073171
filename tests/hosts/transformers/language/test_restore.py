"""Restoring, repeated conversion and copies; saving and loading are tested in test_saving.py."""

import copy
import pickle

import pytest
import torch
import transformers

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import copy_of, generated, stock
from tests.hosts.transformers.tiny import CLASSES, FAMILIES, batch, make
from vispe.errors import UnsupportedHost


def structure(model):
    """Return classes, attributes of modules, buffers and configuration of a model."""
    ignored = (
        "rope_deltas",
        "_output_capturing_hooks_installed",
    )  # what stock models keep of their first call
    modules = {
        name: (type(m), sorted(k for k in vars(m) if k not in ignored), sorted(m._buffers), m.training)
        for name, m in model.named_modules()
    }
    return modules, list(model.state_dict()), model.config.to_dict()


def everything(family):
    return batch(family, [5], [3, "image", 4], [1, "wide", 1, "image", 2])


@cases("spec", ["mrope_i(spatial_reset=true)", "mhrope(sections=[1,0,1])"])
@cases("family", FAMILIES)
def test_restore_recovers_the_stock_model(family, spec):
    model, sample = copy_of(family, 2), everything(family)
    before, expected = structure(model), generated(model, sample, 3)
    modules = dict(model.named_modules())
    assert vispe.convert(model, spec) is model
    names, config = structure(model)[1:]
    assert config.pop("vispe")["scheme"]["name"] == spec.partition("(")[0]
    assert (names, config) == before[1:]
    assert not torch.equal(generated(model, sample, 3)[1], expected[1])
    assert vispe.restore(model) is model
    assert structure(model) == before
    assert {n: id(m) for n, m in model.named_modules()} == {n: id(m) for n, m in modules.items()}
    actual = generated(model, sample, 3)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    with pytest.raises(
        UnsupportedHost, match=r"must be a converted one, got transformers \w+ without an encoding"
    ):
        vispe.restore(model)


@cases("family", FAMILIES)
def test_a_second_conversion_replaces_the_scheme(family):
    sample = everything(family)
    model = vispe.convert(vispe.convert(copy_of(family), "mrope_i"), "v2pe")
    once = vispe.convert(copy_of(family), "v2pe")
    assert structure(model)[0] == structure(once)[0]
    assert torch.equal(model(**sample.inputs).logits, once(**sample.inputs).logits)
    vispe.restore(model)
    assert structure(model) == structure(stock(family))


@cases("family", FAMILIES)
def test_stock_classes_are_not_modified(family):
    cls = getattr(transformers, CLASSES[family])
    before = {c: dict(vars(c)) for c in (cls, *(type(m) for m in stock(family).modules()))}
    model = vispe.convert(copy_of(family), "mrope_i")
    generated(model, everything(family), 2)
    assert isinstance(model, cls)
    assert {c: dict(vars(c)) for c in before} == before
    assert type(model).__name__ == CLASSES[family]


@cases("family", FAMILIES)
def test_copies_and_pickles_are_converted(family):
    sample = everything(family)
    model = vispe.convert(make(family), "v2pe")
    # stock models cannot be pickled once they ran
    others = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    )
    expected = model(**sample.inputs).logits
    for other in others:
        assert torch.equal(other(**sample.inputs).logits, expected)
        vispe.restore(other)
        assert structure(other) == structure(stock(family))
    assert torch.equal(model(**sample.inputs).logits, expected)


def loaded_in_half(family):
    """Return the stock model as `from_pretrained(dtype=torch.bfloat16)` loads it: frequencies stay in float32."""
    model = copy_of(family)
    rotary = model.model.language_model.rotary_emb
    rates = rotary.inv_freq
    model.to(torch.bfloat16)
    rotary.inv_freq = rates
    return model


@cases("family", FAMILIES)
def test_a_converted_model_may_change_its_precision(family):
    sample = batch(family, [8])
    model = vispe.convert(copy_of(family), "mrope_i").to(torch.bfloat16)
    assert torch.equal(model(**sample.inputs).logits, loaded_in_half(family)(**sample.inputs).logits)


@cases("family", FAMILIES)
def test_the_model_without_its_head(family):
    sample = everything(family)
    complete = vispe.convert(copy_of(family), "mrope_i")
    inner = vispe.convert(copy_of(family).model, "mrope_i")
    assert torch.equal(
        inner(**sample.inputs).last_hidden_state, complete.model(**sample.inputs).last_hidden_state
    )
    vispe.restore(inner)
    assert structure(inner) == structure(stock(family).model)


def test_a_scheme_that_needs_a_table_is_rejected():
    model = copy_of("qwen2_vl")
    before = structure(model)
    with pytest.raises(
        UnsupportedHost, match=r"rotate=inter.* encodes the axes \[1, 2\] by a table .* rotate=both"
    ):
        vispe.convert(model, "bilevel(rotate=inter)")
    assert structure(model) == before
