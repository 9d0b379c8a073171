"""Mirrored pairs: statements are true, a model with positions learns them, one without does not."""

import math

import pytest
import torch
from torch import nn

from vispe.errors import OptionError, ShapeError
from vispe.experimental.vlm.mirrored_pairs import (
    iterate_pairs,
    matching_accuracy,
    mirrored_pairs,
    pair_contrastive_loss,
)

SIDE = 32
LEXICON = ("red", "blue", "disc", "square", "left", "right", "above", "below")


def test_statements_are_true_and_mirrored_with_the_image():
    pairs = mirrored_pairs(24, side=64)
    for pair, (first, second) in zip(pairs.images, pairs.statements, strict=True):
        image = pair[0]
        red = (image[0] > 0.8) & (image[2] < 0.2)
        blue = (image[2] > 0.8) & (image[0] < 0.2)
        centres = [torch.nonzero(mask).double().mean(0) for mask in (red, blue)]
        subject, reference = (0, 1) if first.startswith("the red") else (1, 0)
        gap = centres[subject] - centres[reference]
        word = first.split(" is ")[1].split(" the ")[0]
        assert {"left of": gap[1] < 0, "right of": gap[1] > 0, "above": gap[0] < 0, "below": gap[0] > 0}[word]
        rotated = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
        assert second == first.replace(word, rotated[word])
        axis = 1 if word in ("above", "below") else 2
        assert torch.equal(pair[1], image.flip(axis))


def test_batches_are_reproducible_and_differ_between_steps():
    stream = iterate_pairs(3, seed=5, side=SIDE)
    first, second = next(stream), next(stream)
    assert torch.equal(first.images, mirrored_pairs(3, seed=5, side=SIDE).images)
    assert second.statements == mirrored_pairs(3, step=1, seed=5, side=SIDE).statements
    assert not torch.equal(first.images, second.images)
    with pytest.raises(OptionError, match="batch needs an integer above 0, got batch=0"):
        mirrored_pairs(0)


def test_the_loss_equals_a_loop():
    scores = torch.randn(5, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for one, loss in zip(scores, pair_contrastive_loss(scores), strict=True):
        p, q = one.softmax(0), one.softmax(1)
        expected = -sum(math.log(float(t[k, k])) for t in (p, q) for k in (0, 1)) / 4
        assert float(loss) == pytest.approx(expected)
    assert matching_accuracy(torch.tensor([[[2.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])) == 0.5
    with pytest.raises(ShapeError, match=r"scores must have the shape \(b, 2, 2\)"):
        pair_contrastive_loss(torch.zeros(2, 2))


class Small(nn.Module):
    """Images by their pixels, at their positions or without; statements by their words, in order."""

    def __init__(self, positions):
        super().__init__()
        self.positions = positions
        self.of_image = nn.Sequential(nn.Linear(3 * 64 if positions else 3, 64), nn.ReLU(), nn.Linear(64, 32))
        self.of_words = nn.Sequential(nn.Linear(6 * len(LEXICON), 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, pairs):
        cells = nn.functional.adaptive_avg_pool2d(pairs.images.flatten(0, 1) - 0.5, 8)
        features = cells.flatten(1) if self.positions else cells.mean((2, 3))
        words = torch.zeros(2 * len(pairs.statements), 6, len(LEXICON))
        for row, statement in enumerate(s for pair in pairs.statements for s in pair):
            known = [w for w in statement.split() if w in LEXICON]
            for position, word in enumerate(known):
                words[row, position, LEXICON.index(word)] = 1
        images = self.of_image(features).unflatten(0, (-1, 2))
        statements = self.of_words(words.flatten(1)).unflatten(0, (-1, 2))
        return torch.einsum("bid,bjd->bij", images, statements)


def trained(positions, steps):
    torch.manual_seed(0)
    model = Small(positions)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _, pairs in zip(range(steps), iterate_pairs(64, side=SIDE), strict=False):
        optimizer.zero_grad()
        pair_contrastive_loss(model(pairs)).mean().backward()
        optimizer.step()
    with torch.no_grad():
        scores = model(mirrored_pairs(256, seed=99, side=SIDE))
    return matching_accuracy(scores), float(pair_contrastive_loss(scores).mean())


@pytest.mark.slow
def test_a_model_with_positions_learns_it():
    share, loss = trained(True, 400)
    assert share > 0.98
    assert loss < 0.1


@pytest.mark.slow
def test_a_model_without_positions_stays_at_chance():
    _, loss = trained(False, 30)
    assert loss == pytest.approx(math.log(2), abs=0.01)
