"""Restoring, converting again and copying; saving and loading are in test_saving.py."""

import copy
import pickle

import pytest
import torch
import transformers

import vispe
from tests.hosts.transformers.reference import copy_of, generated, stock
from tests.hosts.transformers.tiny import CLASSES, FAMILIES, batch, make
from vispe.errors import UnsupportedHost


def things(model):
    """What a model is made of: classes, names on the modules, buffers, configuration."""
    own = ("rope_deltas", "_output_capturing_hooks_installed")  # what stock models keep of their first call
    kept = {
        name: (type(m), sorted(k for k in vars(m) if k not in own), sorted(m._buffers), m.training)
        for name, m in model.named_modules()
    }
    return kept, list(model.state_dict()), model.config.to_dict()


def everything(family):
    return batch(family, [5], [3, "image", 4], [1, "wide", 1, "image", 2])


@pytest.mark.parametrize("spec", ["mrope_i(spatial_reset=true)", "mhrope(sections=[1,0,1])"])
@pytest.mark.parametrize("family", FAMILIES)
def test_restore_gives_everything_back(family, spec):
    model, given = copy_of(family, 2), everything(family)
    before, wanted = things(model), generated(model, given, 3)
    modules = dict(model.named_modules())
    assert vispe.convert(model, spec) is model
    names, config = things(model)[1:]
    assert config.pop("vispe")["scheme"]["name"] == spec.partition("(")[0]
    assert (names, config) == before[1:]
    assert not torch.equal(generated(model, given, 3)[1], wanted[1])
    assert vispe.restore(model) is model
    assert things(model) == before
    assert {n: id(m) for n, m in model.named_modules()} == {n: id(m) for n, m in modules.items()}
    found = generated(model, given, 3)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    with pytest.raises(UnsupportedHost, match="nothing to restore"):
        vispe.restore(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_converting_again_replaces_the_scheme(family):
    given = everything(family)
    model = vispe.convert(vispe.convert(copy_of(family), "mrope_i"), "v2pe")
    once = vispe.convert(copy_of(family), "v2pe")
    assert things(model)[0] == things(once)[0]
    assert torch.equal(model(**given.inputs).logits, once(**given.inputs).logits)
    vispe.restore(model)
    assert things(model) == things(stock(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stock_classes_stay_as_they_are(family):
    cls = getattr(transformers, CLASSES[family])
    before = {c: dict(vars(c)) for c in (cls, *(type(m) for m in stock(family).modules()))}
    model = vispe.convert(copy_of(family), "mrope_i")
    generated(model, everything(family), 2)
    assert isinstance(model, cls)
    assert {c: dict(vars(c)) for c in before} == before
    assert type(model).__name__ == CLASSES[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_and_pickles_are_converted_too(family):
    given = everything(family)
    model = vispe.convert(make(family), "v2pe")
    others = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    )  # stock models cannot be pickled once they ran
    wanted = model(**given.inputs).logits
    for other in others:
        assert torch.equal(other(**given.inputs).logits, wanted)
        vispe.restore(other)
        assert things(other) == things(stock(family))
    assert torch.equal(model(**given.inputs).logits, wanted)


def loaded_in_half(family):
    """Return the stock model as `from_pretrained(dtype=torch.bfloat16)` loads it: frequencies stay in float32."""
    model = copy_of(family)
    rotary = model.model.language_model.rotary_emb
    rates = rotary.inv_freq
    model.to(torch.bfloat16)
    rotary.inv_freq = rates
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_may_change_its_precision(family):
    given = batch(family, [8])
    model = vispe.convert(copy_of(family), "mrope_i").to(torch.bfloat16)
    assert torch.equal(model(**given.inputs).logits, loaded_in_half(family)(**given.inputs).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_without_its_head(family):
    given = everything(family)
    whole = vispe.convert(copy_of(family), "mrope_i")
    inner = vispe.convert(copy_of(family).model, "mrope_i")
    assert torch.equal(inner(**given.inputs).last_hidden_state, whole.model(**given.inputs).last_hidden_state)
    vispe.restore(inner)
    assert things(inner) == things(stock(family).model)


def test_a_scheme_that_counts_on_a_table_is_refused():
    model = copy_of("qwen2_vl")
    before = things(model)
    with pytest.raises(
        UnsupportedHost, match=r"rotate=inter.* leaves the axes \[1, 2\] to a table .* rotate=both"
    ):
        vispe.convert(model, "bilevel(rotate=inter)")
    assert things(model) == before
