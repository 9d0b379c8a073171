"""`pos_embed=` of timm's factory in every spelling; names of timm keep their meaning."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from timm.models import VisionTransformer
from timm.models.deit import VisionTransformerDistilled
from timm.utils import ParseKwargs

import vispe
from tests.cases import cases
from tests.hosts.helpers import SHAPE, close, dense, head_masks, image, oracle, without_table
from vispe.errors import OptionError, UnknownEncoding, UnsupportedCombination
from vispe.hosts.timm import patch_constructors

ROOT = Path(__file__).resolve().parents[3]
GEOMETRIC = torch.tensor([2.0 ** (-8 * k / 4) for k in range(1, 5)]).expand(2, 4)


def make(pos_embed, name="vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    return timm.create_model(name, pos_embed=pos_embed, **{**SHAPE, **options}).eval()


@cases(
    ("spec", "slopes", "rule"),
    [
        ("alibi2d", None, {}),
        ("alibi2d.dinosaw", None, {}),
        ("alibi2d.geometric", GEOMETRIC, {}),
        ("alibi2d(slopes=geometric,wrap=false)", GEOMETRIC, {"wrap": False}),
        ("alibi2d(slopes:geometric, normalize:none)", GEOMETRIC, {"normalize": False}),
        ({"name": "alibi2d", "wrap": False}, None, {"wrap": False}),
        ({"name": "alibi2d.local"}, None, {"wrap": False, "normalize": False}),
        ([{"name": "alibi2d", "wrap": False}], None, {"wrap": False}),
    ],
    ids=str,
)
def test_every_spelling_of_a_bias(spec, slopes, rule):
    ours = make(spec)
    stock = make("none")
    stock.load_state_dict(ours.state_dict())
    x = image()
    close(ours.forward_features(x), oracle(stock, x, head_masks(stock, dense(3, 5, 1, **rule), slopes)))
    assert ours.pos_embed is None
    assert isinstance(ours, VisionTransformer)


def test_sums_and_learn_in_sums():
    x = image()
    both = make("sincos2d+alibi2d")
    added = vispe.convert(make("none"), "sincos2d").pos_enc.table(vispe.Grid((3, 5), prefix=1).positions())
    stock = make("none")
    close(both.forward_features(x), oracle(stock, x, head_masks(stock, dense(3, 5, 1)), added))
    remaining = make("learn+alibi2d")
    stock = make("learn")
    assert torch.equal(remaining.pos_embed, stock.pos_embed)
    close(remaining.forward_features(x), oracle(stock, x, head_masks(stock, dense(3, 5, 1))))


@cases("word", ["learn", "none", ""])
@cases("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_names_of_timm_give_identical_models(word, name):
    ours = make(word, name)
    patch_constructors.uninstall()
    try:
        stock = make(word, name)
    finally:
        patch_constructors.install()
    assert type(ours) is type(stock) in (VisionTransformer, VisionTransformerDistilled)
    actual_state, expected_state = ours.state_dict(), stock.state_dict()
    assert list(actual_state) == list(expected_state)
    assert all(torch.equal(actual_state[k], expected_state[k]) for k in actual_state)
    assert torch.equal(ours(image()), stock(image()))
    assert vars(ours).keys() == vars(stock).keys()


def test_the_distilled_model_has_no_table():
    ours = make("alibi2d", "deit_tiny_distilled_patch16_224")
    assert isinstance(ours, VisionTransformerDistilled)
    assert ours.pos_embed is None
    stock = without_table(make("learn", "deit_tiny_distilled_patch16_224"))
    stock.load_state_dict(ours.state_dict(), strict=False)
    close(ours(image()), stock.forward_head(oracle(stock, image(), head_masks(stock, dense(3, 5, 2)))))


@cases(
    ("spec", "error", "text"),
    [
        ("alibi", UnsupportedCombination, "alibi supports 1 axis, got the 2-axis grid of"),
        ("alibi2", UnknownEncoding, "no encoding 'alibi2'.* Did you mean .*'alibi2d'"),
        ("lern", UnknownEncoding, "Did you mean 'learned'"),
        ("alibi2d.dinosaur", UnknownEncoding, "Did you mean 'alibi2d.dinosaw'"),
        ("alibi2d(slope=learned)", OptionError, "no option 'slope'.* Did you mean 'slopes'"),
        ("alibi2d(slopes=big)", OptionError, "slopes must be one of"),
        ("alibi2d(layers=[7])", OptionError, "below depth=2"),
        ("learn+", OptionError, "The encoding '' cannot be parsed. Use name"),
        (7, OptionError, "got 7"),
        ({"wrap": True}, OptionError, "needs a 'name'"),
    ],
    ids=str,
)
def test_unknown_names_and_options_raise_and_suggest(spec, error, text):
    with pytest.raises(error, match=text):
        make(spec)


def test_a_width_that_an_encoding_cannot_use_raises():
    with pytest.raises(OptionError, match="divisible by 4, got dim=18"):
        make("sincos2d", embed_dim=18, num_heads=3)


def test_positional_argument():
    args = [(24, 40), 8, 3, 5, "token", 32, 2, 4, 4.0, True, False, False, False, True, None, True]
    torch.manual_seed(0)
    ours = VisionTransformer(*args, "alibi2d", True)
    assert ours.pos_embed is None
    assert ours.no_embed_class is True
    assert ours.vispe.spec == [{"name": "alibi2d"}]
    assert torch.equal(ours.eval()(image()), make("alibi2d", no_embed_class=True)(image()))
    assert type(VisionTransformer(*args, "learn")) is VisionTransformer


def test_install_twice_and_uninstall():
    wrapped = VisionTransformer.__init__
    patch_constructors.install()
    patch_constructors.install()
    assert VisionTransformer.__init__ is wrapped
    ours = make("alibi2d")
    patch_constructors.uninstall()
    patch_constructors.uninstall()
    try:
        assert VisionTransformer.__init__ is wrapped.vispe_original
        with pytest.raises(AssertionError):
            make("alibi2d")
        assert ours(image()).isfinite().all()
        assert torch.equal(copy.deepcopy(ours)(image()), ours(image()))
    finally:
        patch_constructors.install()
    assert make("alibi2d").vispe.spec


def test_create_model_bound_before_vispe_is_imported():
    """Converting a model of timm imports no other library of models."""
    code = (
        "import sys\n"
        "from timm import create_model\n"
        "try:\n    create_model('vit_tiny_patch16_224', pos_embed='alibi2d', depth=1)\n"
        "except AssertionError:\n    print('stock refuses')\n"
        "import vispe\n"
        "model = create_model('vit_tiny_patch16_224', pos_embed='alibi2d', depth=1)\n"
        "print(type(model).__name__)\n"
        "vispe.restore(vispe.convert(create_model('test_vit', depth=1), 'alibi2d'))\n"
        "print(sorted({'open_clip', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split("\n")[:3] == ["stock refuses", "VispeVisionTransformer", "[]"]


@cases("text", ["pos_embed=alibi2d", "pos_embed={'name':'alibi2d','wrap':True}"])
def test_model_kwargs_of_timms_scripts(text):
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
    args = parser.parse_args(["--model-kwargs", text, "qk_norm=True"])
    assert torch.equal(make(**args.model_kwargs)(image()), make("alibi2d", qk_norm=True)(image()))
