"""Models built without values: on the meta device, and loaded afterwards."""

import copy

import pytest
import torch
import transformers

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import converted, stock
from tests.hosts.transformers.tiny import CLASSES, FAMILIES, batch, config

pytestmark = pytest.mark.filterwarnings("ignore:.*does not encode text:UserWarning")
SPECS = ("mrope_i", "vrope", "hope_vlm", "mhrope(sections=[1,0,1])")


def on_meta(family, spec, inside):
    """Return a converted model without values; `inside`, whether it is converted under the meta device."""
    with torch.device("meta"):
        model = getattr(transformers, CLASSES[family])(config(family, 2)).eval()
        if inside:
            return vispe.convert(model, spec)
    return vispe.convert(model, spec)


def allocated(model):
    return model.model.language_model.vispe_axis_of_pair


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", FAMILIES)
def test_emptied_models_store_their_allocation(family, spec, inside):
    model = on_meta(family, spec, inside)
    assert allocated(model).is_meta
    expected = allocated(converted(family, spec, 2))
    model.to_empty(device="cpu")
    assert torch.equal(allocated(model), expected)
    allocated(model).fill_(7)  # what loading without values leaves
    model.init_weights()
    assert torch.equal(allocated(model), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_loaded_later(family):
    sample = batch(family, [7], [3, "image", 4, "wide", 2])
    expected = vispe.convert(copy.deepcopy(stock(family, 2)), "vrope")
    model = on_meta(family, "vrope", True)
    model.to_empty(device="cpu")
    model.init_weights()
    model.load_state_dict(expected.state_dict())
    with torch.no_grad():
        assert torch.equal(model(**sample.inputs).logits, expected(**sample.inputs).logits)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("spec", ["alibi2d", "rope_axial", "irpe", "grape_alibi"])
@pytest.mark.parametrize("family", FAMILIES)
def test_towers_can_be_converted_without_values(family, spec, inside):
    sample = batch(family, [3, "image", 4, "wide", 2])
    expected = vispe.convert(copy.deepcopy(stock(family, 2)), spec)
    model = on_meta(family, spec, inside)
    model.to_empty(device="cpu")
    model.init_weights()
    model.load_state_dict(expected.state_dict())
    with torch.no_grad():
        assert torch.equal(model(**sample.inputs).logits, expected(**sample.inputs).logits)


def vision_model(name):
    config = getattr(transformers, f"{name}VisionConfig")(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, patch_size=4,
        **{"num_patches": 16} if name == "Siglip2" else {"image_size": 16},
    )  # fmt: skip
    return getattr(transformers, f"{name}VisionModel")(config).eval()


@cases("name", ["CLIP", "Siglip", "Siglip2"])
def test_placeholders_of_tables_are_not_loaded(name):
    """Models built without values and loaded by accelerate, or with weights of another dtype."""
    accelerate = pytest.importorskip("accelerate", reason="vispe[train] is not installed")
    source = vispe.convert(vision_model(name).double(), "alibi2d")
    inputs = {"pixel_values": torch.rand(2, 3, 16, 16).double()}
    if name == "Siglip2":
        shapes = torch.tensor([[4, 4], [2, 6]])
        inputs = {"pixel_values": torch.rand(2, 16, 48).double(), "spatial_shapes": shapes}
        inputs["pixel_attention_mask"] = (torch.arange(16) < shapes.prod(1, keepdim=True)).long()
    with torch.no_grad():
        expected = source(**inputs).last_hidden_state
    with accelerate.init_empty_weights():
        dispatched = vispe.convert(vision_model(name), "alibi2d")
    with torch.device("meta"):
        assigned = vispe.convert(vision_model(name), "alibi2d")
    for key, value in source.state_dict().items():
        accelerate.utils.set_module_tensor_to_device(dispatched, key, "cpu", value, dtype=torch.float64)
    assigned.load_state_dict(source.state_dict(), assign=True)
    for path, buffer in source.named_buffers():  # position ids, which checkpoints do not have
        holder, _, key = path.rpartition(".")
        assigned.get_submodule(holder)._buffers[key] = buffer
    for model in (dispatched.to("cpu"), assigned):
        with torch.no_grad():
            assert torch.equal(model(**inputs).last_hidden_state, expected)


def test_an_allocation_moves_with_its_model():
    model = vispe.convert(copy.deepcopy(stock("llava", 2)), "vrope")
    expected = allocated(model).clone()
    for moved in (model.double(), model.bfloat16(), model.to("cpu")):
        assert torch.equal(allocated(moved), expected)
    assert "vispe_axis_of_pair" not in "".join(model.state_dict())
