"""Encodings that mix tokens between blocks: the blocks after which they run, in all ways to run a model."""

import copy

import pytest
import torch
from timm.models import Eva, VisionTransformer
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelThingsBlock

import vispe
from tests.cases import cases
from tests.hosts.helpers import SHAPE, close, grads, image, keep_of, tiny, without_table
from vispe.encodings import registry
from vispe.encodings.base import Mixing
from vispe.errors import UnsupportedCombination


class AddRowColumnMean(Mixing):
    """Test encoding that adds row, column and the mean of the patches, scaled, to every token with a position."""

    name = "stir"

    def __init__(self, *, dim: int, layers: tuple[int, ...] = (0, 2), own: bool = False) -> None:
        super().__init__()
        self.dim, self.layers, self.own = dim, layers, own
        self.scale = torch.nn.Parameter(torch.linspace(-1, 1, dim))

    @property
    def per_layer(self):
        return self.own

    def active(self, layer):
        return layer in self.layers

    def mix(self, x, pos, layer):
        spatial = pos.spatial[..., None]
        mean = (x * spatial).sum(1, keepdim=True) / spatial.sum(1, keepdim=True)
        row = (pos.coords @ torch.tensor([1.0, 0.1]))[..., None]
        return x + spatial * (mean + row) * self.scale * (layer + 1)


@pytest.fixture(autouse=True)
def stir():
    registry.register(AddRowColumnMean)
    yield
    registry._REGISTRY.pop("stir")


def by_hand(model, x, keep=None):
    """Return tokens after the blocks of timm with explicit mixing after blocks 0 and 2, and the output of each."""
    stock, mixer = model.stock, model.mixer
    x = stock._pos_embed(stock.patch_embed(x))
    x = x[0] if isinstance(x, tuple) else x
    grid = vispe.Grid((3, 5), prefix=stock.num_prefix_tokens).positions()
    if keep is not None:
        x, grid = x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1])), grid.gather(keep)
    x, taken = stock.norm_pre(x), []
    for i, block in enumerate(stock.blocks):
        x = block(x)
        if i in mixer.layers:
            x = mixer.mix(x, grid, i)
        taken.append(x)
    return stock.norm(x), taken


class Pair:
    def __init__(self, stock, ours):
        self.stock, self.ours, self.mixer = stock, ours, ours.pos_enc


def pair(spec="stir", **options) -> Pair:
    stock = without_table(tiny(depth=3, **options))
    return Pair(stock, vispe.convert(copy.deepcopy(stock), spec))


@cases("options", [
    {}, {"class_token": False, "global_pool": "avg"}, {"reg_tokens": 2}, {"block_fn": ParallelThingsBlock},
    {"block_fn": DiffParallelScalingBlock}, {"dynamic_img_size": True},
], ids=str)  # fmt: skip
@cases("checkpointing", [False, True])
def test_tokens_are_mixed_after_each_active_block(options, checkpointing):
    models = pair(**options)
    models.ours.set_grad_checkpointing(checkpointing)
    x = image()
    expected, taken = by_hand(models, x)
    actual = models.ours.forward_features(x)
    close(actual, expected)
    gradients = grads(models.ours, actual)
    mixing = gradients.pop("pos_enc.scale")
    close(gradients, grads(models.stock, expected))
    assert mixing.abs().min() > 1e-4
    final, intermediates = models.ours.forward_intermediates(x, output_fmt="NLC")
    close(final, expected)
    for mixed, tokens in zip(intermediates, taken, strict=True):
        close(mixed, tokens[:, models.stock.num_prefix_tokens :])


def test_dropped_patches_keep_their_positions():
    models = pair(patch_drop_rate=0.4)
    x = image()
    models.ours.train()
    keep = keep_of(3, 2, 15, 1, 0.4)
    torch.manual_seed(3)
    actual = models.ours.forward_features(x)
    close(actual, by_hand(models, x, keep)[0])
    assert actual.shape[1] < 16


def test_mixing_alongside_a_bias_and_after_restoring():
    models = pair("stir+alibi2d(slopes=learned)")
    x = image()
    assert "pos_enc.scale" in models.ours.state_dict()
    out = models.ours(x)
    assert torch.equal(copy.deepcopy(models.ours)(x), out)
    with torch.no_grad():
        models.ours.pos_enc.scale.zero_()
    bias = vispe.convert(copy.deepcopy(models.stock), "alibi2d(slopes=learned)")
    bias.load_state_dict({k: v for k, v in models.ours.state_dict().items() if k != "pos_enc.scale"})
    close(models.ours(x), bias(x))
    assert torch.equal(vispe.restore(models.ours)(x), models.stock(x))


def test_mixing_in_eva():
    torch.manual_seed(0)
    stock = Eva(**{**SHAPE, "depth": 3}, use_abs_pos_emb=False).eval()
    ours = vispe.convert(copy.deepcopy(stock), "stir")
    close(ours.forward_features(image()), by_hand(Pair(stock, ours), image())[0])


@cases("spec", ["peg", "peg.cpvt", "peg.retrofit", "peg(after=[0,2],padding=circular)"])
@cases("cls", [VisionTransformer, Eva])
def test_peg_runs_after_its_blocks(cls, spec):
    torch.manual_seed(0)
    stock = without_table(cls(**{**SHAPE, "depth": 3}).eval())
    ours = vispe.convert(copy.deepcopy(stock), spec)
    models = Pair(stock, ours)
    models.mixer.layers = ours.pos_enc.blocks
    close(ours.forward_features(image()), by_hand(models, image())[0])
    if spec == "peg.retrofit":
        assert torch.equal(ours(image()), vispe.convert(copy.deepcopy(stock), "none")(image()))


def test_a_mixing_encoding_with_parameters_per_layer_is_rejected():
    with pytest.raises(
        UnsupportedCombination, match=r"stir mixes .* got per_layer=True\. Set per_layer to False"
    ):
        vispe.convert(tiny(), "stir(own=true)")
