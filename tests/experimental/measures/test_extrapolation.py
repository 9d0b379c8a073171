"""The extrapolation task: answers against a slow oracle, the small model on any grid, and training."""

import pytest
import torch

import vispe
from vispe.encodings.positions.shift import Shift
from vispe.errors import OptionError
from vispe.experimental.measures.extrapolation import (
    PALETTE,
    PATCH,
    ExtrapolationRecipe,
    SceneViT,
    scenes,
    score,
    train,
)


def slow_answers(image):
    """Return the answers of one image (3, 4 h, 4 w), from its pixels."""
    h, w = (n // PATCH for n in image.shape[1:])
    markers = []
    for y in range(h):
        for x in range(w):
            colour = image[:, y * PATCH : (y + 1) * PATCH, x * PATCH : (x + 1) * PATCH].mean((1, 2))
            for c, expected in enumerate(PALETTE):
                if (colour - torch.tensor(expected)).abs().max() < 0.2:
                    markers.append((y, x, c))
    answers = torch.full((2, h, w), -1)
    for y in range(h):
        for x in range(w):
            for question, captured in enumerate((markers, [m for m in markers if m[0] < y])):
                if captured:
                    near = min((y - a) ** 2 + (x - b) ** 2 for a, b, _ in captured)
                    colours = {c for a, b, c in captured if (y - a) ** 2 + (x - b) ** 2 == near}
                    if len(colours) == 1:
                        answers[question, y, x] = colours.pop()
    return answers


@pytest.mark.parametrize(("shape", "markers"), [((6, 6), 3), ((3, 7), 5), ((1, 4), 2), ((5, 2), 10)])
def test_answers_are_those_of_the_image(shape, markers):
    batch = scenes(6, shape, torch.Generator().manual_seed(1), markers=markers, noise=0.05)
    assert batch.images.shape == (6, 3, shape[0] * PATCH, shape[1] * PATCH)
    expected = torch.stack([slow_answers(image) for image in batch.images])
    assert torch.equal(batch.answers, expected)
    assert (batch.answers >= 0).any()


def test_scenes_are_reproducible_and_too_small_grids_raise():
    one, two = (scenes(3, (4, 5), torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(one.images, two.images)
    with pytest.raises(OptionError, match="in 1 to 4 for 2 x 2 patches, got 5"):
        scenes(1, (2, 2), torch.Generator(), markers=5)


@pytest.mark.parametrize("spec", ["alibi2d", "learned", "none"])
def test_the_model_answers_on_any_grid(spec):
    model = SceneViT(spec, (4, 4), dim=16, depth=1, num_heads=2).eval()
    for shape in ((4, 4), (2, 6), (5, 3)):
        images = scenes(2, shape, torch.Generator().manual_seed(0)).images
        assert model(images).shape == (2, len(PALETTE), 2, *shape)


def test_scores_count_right_answers():
    generator = torch.Generator().manual_seed(0)
    requested = [scenes(count, (3, 4), generator).answers for count in (64, 6)]
    calls = iter(requested)

    class Oracle(torch.nn.Module):
        def forward(self, images):
            answers = next(calls).clamp(min=0)
            answers[:, 1] = (answers[:, 1] + 1) % len(PALETTE)  # all wrong
            return torch.nn.functional.one_hot(answers, len(PALETTE)).movedim(-1, 1)

    actual = score(Oracle(), (3, 4), count=70, seed=0)
    assert actual == {"distance": 1.0, "direction": 0.0}


def test_samplers_follow_the_training(monkeypatch):
    messages = []
    monkeypatch.setattr(Shift, "on_progress", lambda self, progress, seed: messages.append((progress, seed)))
    train(
        "shift(reach=9,curriculum=[0,5])+sincos2d",
        3,
        ExtrapolationRecipe(shape=(3, 3), steps=4, batch_size=2),
    )
    assert [progress for progress, _ in messages] == [0, 0.25, 0.5, 0.75, 1]
    assert len({seed for _, seed in messages}) == 5
    assert messages[-1][1] is None


def test_the_recipe_sets_the_size_of_the_model():
    recipe = ExtrapolationRecipe(shape=(2, 3), steps=1, batch_size=2, dim=24, depth=2, num_heads=3)
    model = train("sincos2d", 0, recipe)
    assert (model.body.embed_dim, len(model.body.blocks), model.body.blocks[0].attn.num_heads) == (24, 2, 3)
    assert score(model, (3, 3), count=5, batch_size=2).keys() == {"distance", "direction"}


def test_training_is_reproducible_and_learns():
    losses = []
    recipe = ExtrapolationRecipe(shape=(3, 3), steps=40, batch_size=16)
    model = train("sincos2d", 0, recipe, lambda _, loss: losses.append(loss))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    results = []
    with pytest.raises(StopIteration):
        train(
            "sincos2d",
            0,
            recipe,
            lambda _, loss: results.append(loss) if len(results) < 5 else next(iter(())),
        )
    assert results == losses[:5]
    assert vispe.describe(model).startswith("body: ")
