"""Masked image modelling with small ViTs: reproducible, resumable, and without leakage of hidden patches."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vispe
from models import masked, training_images
from vispe.images.symmetry.symmetrization import patch_kernel

ROOT = Path(__file__).parents[2]
TINY = masked.Recipe(
    img_size=24, patch_size=4, dim=24, depth=2, num_heads=2, textures=5, steps=6, batch_size=3
)


@pytest.fixture(scope="module")
def pool():
    make = torch.Generator().manual_seed(0)
    return [
        torch.randint(256, (3, h, w), generator=make, dtype=torch.uint8)
        for h, w in ((30, 41), (24, 24), (9, 90))
    ]


def _state(model):
    return {name: p.clone() for name, p in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["learn", "rope_axial", "alibi2d(slopes=learned)"])
def test_a_resumed_run_equals_an_uninterrupted_one(encoding, pool, tmp_path):
    uninterrupted, losses = masked.train(encoding, TINY, pool)
    file = tmp_path / "state.pt"

    class Stop(Exception):
        pass

    def stop(step, loss):
        if step == 3:
            raise Stop

    with pytest.raises(Stop):
        masked.train(encoding, TINY, pool, state=file, every=2, on_step=stop)
    resumed, resumed_losses = masked.train(encoding, TINY, pool, state=file, every=2)
    assert resumed_losses == losses
    state = uninterrupted.state_dict()
    for name, value in _state(resumed).items():
        assert torch.equal(value, state[name]), name
    with pytest.raises(SystemExit, match="another run"):
        masked.train("none", TINY, pool, state=file)


def test_the_kernel_stays_symmetric_and_learns(pool):
    recipe = replace(TINY, symmetric=True)
    model, _ = masked.train("alibi2d", recipe, pool)
    start = masked.backbone("alibi2d", recipe)
    assert patch_kernel(model).asymmetry < 1e-12
    assert not torch.equal(model.patch_embed.proj.weight, start.patch_embed.proj.weight)
    assert patch_kernel(masked.train("alibi2d", TINY, pool)[0]).asymmetry > 0.1


def test_what_is_hidden_is_not_seen_and_is_requested():
    """The answers do not change with hidden pixels; the loss does, and seen patches are not asked."""
    model = masked.backbone("learn", TINY)
    head = torch.nn.Linear(TINY.dim, 48)
    images = torch.randn(2, 3, 24, 24)

    def loss(x):
        return masked.reconstruction_loss(model, head, x, TINY, torch.Generator().manual_seed(5))

    order = torch.rand(2, 36, generator=torch.Generator().manual_seed(5)).argsort(1)
    hidden = (order < round(0.6 * 36)).reshape(2, 1, 6, 6)
    assert hidden.flatten(1).sum(1).tolist() == [22, 22]
    calls = []
    handle = model.register_forward_pre_hook(lambda module, args: calls.append(args[0]))
    value = loss(images)
    handle.remove()
    wide = hidden.repeat_interleave(4, 2).repeat_interleave(4, 3).expand_as(images)
    assert torch.equal(calls[0], images.masked_fill(wide, 0.0))
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    with torch.no_grad():
        error = (head(model(calls[0])) - patches).square().mean(-1)
    torch.testing.assert_close(value.detach(), error[hidden.flatten(1)].mean())


def test_patches_that_are_seen_are_requested_too_where_they_count():
    model = masked.backbone("learn", TINY)
    head = torch.nn.Linear(TINY.dim, 48)
    images = torch.randn(2, 3, 24, 24)

    def loss(**options):
        make = torch.Generator().manual_seed(5)
        return masked.reconstruction_loss(model, head, images, replace(TINY, **options), make).detach()

    order = torch.rand(2, 36, generator=torch.Generator().manual_seed(5)).argsort(1)
    hidden = order < round(0.6 * 36)
    wide = hidden.reshape(2, 1, 6, 6).repeat_interleave(4, 2).repeat_interleave(4, 3).expand_as(images)
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    with torch.no_grad():
        error = (head(model(images.masked_fill(wide, 0.0))) - patches).square().mean(-1)
    torch.testing.assert_close(loss(shown=0.3), error[hidden].mean() + 0.3 * error[~hidden].mean())


def test_initial_values_are_those_requested():
    plain = masked.backbone("learn", TINY)
    smooth = masked.backbone("learn", replace(TINY, table="sincos", table_std=0.5, kernel_std=0.02))
    table = smooth.pos_embed.detach()[0].reshape(6, 6, 24)
    assert float(table.square().mean().sqrt()) == pytest.approx(0.5, rel=1e-5)
    assert (table[0, 0] - table[0, 1]).norm() < (table[0, 0] - table[0, 5]).norm()
    assert (table[0, 0] - table[1, 0]).norm() < (table[0, 0] - table[5, 0]).norm()
    assert smooth.pos_embed.requires_grad
    assert float(smooth.patch_embed.proj.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    rough = masked.backbone("learn", replace(TINY, table_std=0.3))
    assert float(rough.pos_embed.detach().std()) == pytest.approx(0.3, rel=0.1)
    assert torch.equal(rough.patch_embed.proj.weight, plain.patch_embed.proj.weight)
    assert torch.equal(rough.blocks[1].mlp.fc1.weight, plain.blocks[1].mlp.fc1.weight)
    with pytest.raises(SystemExit, match="need `pos_embed=learn`, got 'alibi2d'"):
        masked.backbone("alibi2d", replace(TINY, table="sincos"))
    with pytest.raises(SystemExit, match="`table` must be 'normal' or 'sincos', got 'wavy'"):
        masked.backbone("learn", replace(TINY, table="wavy"))


@pytest.mark.slow
def test_it_learns():
    """Ramps in all poses: their neighbours tell hidden patches, so the error falls far below that of grey."""
    ramps = [torch.linspace(0, 255, 40).repeat(3, 40, 1).round().to(torch.uint8)]
    recipe = replace(TINY, steps=150, lr=5e-3)
    grey = (
        ((training_images.crops(ramps, 500, 24, torch.Generator().manual_seed(0)) - 0.5) * 4).square().mean()
    )
    _, losses = masked.train("rope_axial", recipe, ramps)
    assert sum(losses[-10:]) / 10 < 0.5 * grey


def test_crops_come_from_large_images_only_and_from_all_poses(pool):
    make = torch.Generator().manual_seed(3)
    result = training_images.crops(pool, 400, 24, make)
    assert result.shape == (400, 3, 24, 24)
    square = pool[1].float() / 255
    poses = [torch.rot90(m, k, (1, 2)) for m in (square, square.flip(-1)) for k in range(4)]
    hits = [sum(torch.equal(f, p) for f in result) for p in poses]
    assert min(hits) > 5
    assert sum(hits) < 300  # the other image is chosen as often


def test_synthetic_images_do_not_depend_on_how_many_are_made():
    first, second = list(training_images.synthetic(2, seed=4)), list(training_images.synthetic(3, seed=4))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=False))
    assert second[0].shape == (3, 256, 256)
    assert second[0].dtype == torch.uint8
    assert not torch.equal(next(training_images.synthetic(1, seed=5)), first[0])


def test_what_scikit_image_installs_is_found():
    result = list(training_images.installed())
    assert len(result) == len(training_images.INSTALLED)
    assert all(p.dtype == torch.uint8 and p.shape[0] == 3 for p in result)


@pytest.mark.slow
def test_the_program_writes_weights_that_load(tmp_path):
    options = "--img-size 24 --patch-size 4 --dim 24 --depth 1 --num-heads 2 --textures 1 --steps 2"
    options += " --batch-size 2 --symmetric"
    process = subprocess.run(
        [sys.executable, str(ROOT / "models" / "masked.py"), "--pos-embed", "alibi2d", "--out", str(tmp_path),
         *options.split()], capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    card = json.loads((tmp_path / "card.json").read_text())
    assert (card["pos_embed"], card["recipe"]["dim"], card["versions"]["vispe"]) == (
        "alibi2d",
        24,
        vispe.__version__,
    )
    recipe = masked.Recipe(**card["recipe"])
    model = masked.backbone(card["pos_embed"], recipe)
    model.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert model(torch.zeros(1, 3, 32, 24)).isfinite().all()
