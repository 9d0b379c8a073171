"""Models whose modules have hooks of accelerate, as for several devices."""

import pytest
import torch

import vispe
from tests.cases import cases
from tests.hosts.transformers.reference import converted, copy_of, stock
from tests.hosts.transformers.tiny import FAMILIES, QWEN, batch
from vispe.errors import UnsupportedHost
from vispe.hosts.transformers.language.rope_in_attention import LateRotation

accelerate = pytest.importorskip("accelerate", reason="vispe[train] is not installed")
pytestmark = [  # LLaVA-OneVision has a parameter alongside its modules, and nothing is offloaded to the CPU
    pytest.mark.filterwarnings("ignore:The following device_map keys do not match:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not encode text:UserWarning"),
]
SPEC = "videorope"


def dispatched(model, family):
    """Return a model with the hooks of a device_map over several devices, layer by layer, all on the CPU."""
    text = "model.language_model"
    parts = [f"{text}.{n}" for n in ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")]
    parts += ["lm_head", "model.visual" if family in QWEN else "model.vision_tower"]
    parts += [] if family in QWEN else ["model.multi_modal_projector"]
    parts += ["model.image_newline"] if family == "llava_onevision" else []
    return accelerate.dispatch_model(model, dict.fromkeys(parts, "cpu"), main_device="cpu", force_hooks=True)


def logits(model, sample):
    with torch.no_grad():
        return model(**sample.inputs).logits


@cases("late", [False, True], ids=["early", "late"])
@cases("family", FAMILIES)
def test_convert_and_then_dispatch(family, late):
    sample = batch(family, [7], [3, "image", 4, "wide", 2])
    expected = logits(vispe.convert(copy_of(family), SPEC, late_rotation=late), sample)
    model = dispatched(vispe.convert(copy_of(family), SPEC, late_rotation=late), family)
    assert torch.equal(logits(model, sample), expected)
    with pytest.raises(UnsupportedHost, match="remove_hook_from_submodules"):
        vispe.restore(model)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert torch.equal(logits(vispe.convert(model, SPEC), sample), expected)
    vispe.restore(model)
    assert torch.equal(logits(model, sample), logits(copy_of(family), sample))


@cases("family", FAMILIES)
def test_converting_after_dispatch_is_refused_before_the_first_change(family):
    sample = batch(family, [7], [3, "image", 4, "wide", 2])
    model = dispatched(copy_of(family), family)
    with pytest.raises(UnsupportedHost, match=r"layers\.0: forward is patched .* convert it"):
        vispe.convert(model, SPEC)
    assert "own position scheme" in vispe.describe(model)
    assert torch.equal(logits(model, sample), logits(stock(family), sample))


@cases("inside", ["model", "model.language_model", "model.language_model.layers.1"])
@cases("family", ["qwen2_vl", "llava"])
def test_every_replaced_module_is_checked(family, inside):
    model = copy_of(family)
    accelerate.hooks.add_hook_to_module(model.get_submodule(inside), accelerate.hooks.ModelHook())
    with pytest.raises(UnsupportedHost, match=f"^{inside}: forward is patched on the instance"):
        vispe.convert(model, SPEC)
    model = copy_of(family)
    model._prepare_position_ids_for_generation = lambda *_: None
    with pytest.raises(
        UnsupportedHost, match="ForConditionalGeneration: _prepare_position_ids_for_generation is patched"
    ):
        vispe.convert(model, SPEC)


@cases("family", ["qwen2_vl", "llava"])
def test_hooks_on_unaffected_modules_remain(family, tmp_path):
    """Weights stored on disk are loaded by hooks of their modules."""
    sample = batch(family, [7], [3, "image", 4, "wide", 2])
    model = accelerate.disk_offload(copy_of(family), tmp_path, execution_device="cpu")
    actual = logits(vispe.convert(model, SPEC), sample)
    torch.testing.assert_close(actual, logits(converted(family, SPEC), sample))


def test_tables_follow_a_layer_to_its_device():
    """Hooks of several devices move tensors inside tuples."""
    tables = torch.ones(1, 1, 2, 3), torch.zeros(1, 1, 2, 3)
    moved = accelerate.utils.send_to_device(LateRotation(tables, tables), "meta")
    assert isinstance(moved, LateRotation)
    assert all(t.is_meta and t.shape == (1, 1, 2, 3) for pair in moved[:2] for t in pair)
