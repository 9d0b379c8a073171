import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from vispe.errors import InputError, OptionError, ShapeError
from vispe.evaluate.probe.fit import fit_probe
from vispe.evaluate.probe.rasa.fit import Rasa, fit_rasa
from vispe.evaluate.probe.rasa.projection import RasaProjection
from vispe.evaluate.probe.rasa.rounds import grid_coords, rasa_loss
from vispe.evaluate.probe.regression_data import Fit
from vispe.evaluate.probe.targets import ramp


def draw(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng([78, seed]).standard_normal(shape))


def positional(b=3, c=9, h=8, w=7, strength=2.0, seed=0):
    """Return maps (b, C, h, w) of noise plus position along random directions, with a constant offset."""
    position = strength * grid_coords((h, w)) @ draw(2, c, seed=seed + 1)
    content = draw(b, h * w, c, seed=seed + 2) + draw(c, seed=seed + 3)
    return (content + position).mT.unflatten(2, (h, w))


def r2(maps):
    """Return the R² over all patches of least squares from features to row and column, with intercept."""
    x = maps.movedim(1, -1).flatten(0, 2).double()
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    t = grid_coords(maps.shape[2:]).repeat(len(maps), 1)
    residual = t - x @ torch.linalg.lstsq(x, t, driver="gelsd").solution
    return float(1 - (residual.square().sum(0) / (t - t.mean(0)).square().sum(0)).mean())


@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "none"])
@pytest.mark.parametrize("alpha", [0.0, 0.03, 2.0])
@pytest.mark.parametrize("seed", range(2))
def test_the_fit_of_a_round_is_the_minimum_of_the_loss(seed, alpha, activation):
    maps = positional(seed=seed)
    projection = Rasa(2, activation=activation, alpha=alpha).fit(maps).projection_
    x, t = maps.movedim(1, -1).flatten(0, 2), grid_coords(maps.shape[2:]).repeat(len(maps), 1)
    for weights in projection.weights:

        def loss(flat, x=x, weights_like=weights):
            w = torch.from_numpy(flat).reshape(weights_like.shape)
            return float(rasa_loss(x, w, t, activation) + alpha * w.square().sum() / 2)

        fitted = loss(weights.flatten().numpy())
        # an independent optimiser without gradients of its own, from another start
        start = 0.1 * np.random.default_rng(seed).standard_normal(weights.numel())
        assert fitted <= minimize(loss, start, method="L-BFGS-B").fun + 1e-6
        basis = torch.linalg.qr(weights.mT)[0]
        x = x - x @ basis @ basis.mT


def test_features_linear_in_position_lose_it_in_one_round_and_keep_their_content():
    c, shape = 10, (6, 5)
    basis = torch.linalg.qr(draw(c, c))[0]
    half = draw(30, 6) @ basis[:, 2:8].mT
    position = grid_coords(shape) @ draw(2, 2, seed=1) @ basis[:, :2].mT
    # each content occurs with both signs at every position, so that it is exactly uncorrelated with position
    x = torch.cat([half + position, position - half])
    maps = x.unflatten(0, (2, *shape)).movedim(-1, 1)
    for activation in ("sigmoid", "none"):
        residual = Rasa(rounds=1, activation=activation).fit(maps).transform(maps)
        assert r2(maps) > 0.999
        assert abs(r2(residual)) < 0.3  # of content alone, within the sample
        torch.testing.assert_close(
            residual.movedim(1, -1).flatten(0, 2), torch.cat([half, -half]), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("order", ["joint", "authors"])
def test_removing_twice_changes_nothing_and_every_round_lowers_r2(order, standardize):
    maps = positional()
    rasa = Rasa(3, order, standardize=standardize).fit(maps)
    first = rasa.transform(maps)
    # fitted from zero, rounds are orthogonal, so that even their product is idempotent
    torch.testing.assert_close(rasa.transform(first), first, atol=1e-6, rtol=0)
    p = rasa.projection_
    flat = p.directions.flatten(0, 1)
    torch.testing.assert_close(flat @ flat.mT, torch.eye(6).double(), atol=1e-6, rtol=0)
    scores = [r2(p.first(k).apply(maps)) for k in range(4)]
    assert scores[0] > 0.4
    assert scores == sorted(scores, reverse=True)
    assert int(torch.linalg.matrix_rank(p.matrix, rtol=1e-6)) == 9 - 6
    assert rasa.losses_ == sorted(rasa.losses_)


def test_both_orders_agree_after_a_fit_and_differ_for_other_weights():
    maps = positional(seed=4)
    torch.testing.assert_close(
        fit_rasa(maps, 3, "joint").matrix, fit_rasa(maps, 3, "authors").matrix, atol=1e-6, rtol=0
    )
    weights = draw(3, 2, 9)
    joint, authors = (RasaProjection(weights, order).matrix for order in ("joint", "authors"))
    assert (joint - authors).abs().max() > 0.05


def test_no_rounds_is_the_identity():
    maps = positional()
    for standardize in (False, True):
        rasa = Rasa(0, standardize=standardize).fit(maps)
        assert torch.equal(rasa.transform(maps), maps)
        torch.testing.assert_close(rasa.projection_.matrix, torch.eye(9).double())
        assert rasa.losses_ == []


@pytest.mark.parametrize("standardize", [False, True])
def test_all_formats_agree_and_keep_their_type(standardize):
    maps = positional(b=2)
    rasa = Rasa(2, standardize=standardize).fit(maps)
    matrix = rasa.projection_.matrix
    images = [one.movedim(0, -1) for one in maps]
    tokens, coords = torch.cat([i.flatten(0, 1) for i in images]), grid_coords((8, 7))
    for features, targets in (
        (maps.numpy(), None),
        (images, None),
        ([i.numpy() for i in images], None),
        (tokens, coords.repeat(2, 1)),
        (tokens.numpy(), coords.repeat(2, 1).numpy()),
        (maps, coords),
    ):
        refitted = Rasa(2, standardize=standardize).fit(features, targets)
        torch.testing.assert_close(refitted.projection_.matrix, matrix)
    out = rasa.transform(maps)
    linear = rasa.projection_.as_linear()
    assert (linear.bias is not None) == standardize
    torch.testing.assert_close(linear(tokens.float()), rasa.transform(tokens).float(), atol=1e-5, rtol=0)
    for x in (maps.numpy(), maps.float(), maps.half(), maps.bfloat16(), maps.float().numpy()):
        result = rasa.transform(x)
        assert type(result) is type(x)
        assert result.dtype == x.dtype
        expected = rasa.transform(torch.as_tensor(x).double())
        torch.testing.assert_close(torch.as_tensor(result), expected.to(torch.as_tensor(x).dtype))
    channels_last = rasa.transform(images[0])
    torch.testing.assert_close(channels_last.movedim(-1, 0), out[0])
    torch.testing.assert_close(rasa.transform(tokens[None])[0], rasa.transform(tokens))
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rasa.transform(tokens[order]), rasa.transform(tokens)[order])


def test_the_fit_does_not_depend_on_the_order_of_tokens_and_images_of_all_sizes_are_pooled():
    maps = [positional(1, h=h, w=w, seed=h)[0].movedim(0, -1) for h, w in ((8, 7), (5, 9), (6, 6))]
    tokens = torch.cat([m.flatten(0, 1) for m in maps])
    coords = torch.cat([grid_coords(m.shape[:2]) for m in maps])
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        fit_rasa(maps, 2).matrix, fit_rasa(tokens[order], 2, coords=coords[order]).matrix, atol=1e-5, rtol=0
    )


def test_volumes_have_three_directions_per_round():
    shape = (3, 4, 5)
    coords = grid_coords(shape).repeat(2, 1)
    tokens = draw(120, 12) + coords @ draw(3, 12, seed=1)
    projection = fit_rasa(tokens, 2, coords=coords)
    assert projection.directions.shape == (2, 3, 12)
    assert int(torch.linalg.matrix_rank(projection.matrix, rtol=1e-6)) == 6


def test_standardisation_is_undone_after_the_projection():
    maps = positional()
    scale = torch.logspace(-2, 2, 9).double()
    rescaled = maps * scale[:, None, None] + 5
    plain, scaled = (Rasa(2, standardize=True).fit(m).transform(m) for m in (maps, rescaled))
    torch.testing.assert_close(scaled, plain * scale[:, None, None] + 5, atol=1e-4, rtol=1e-5)
    # the mean of the features is unchanged
    torch.testing.assert_close(plain.mean((0, 2, 3)), maps.mean((0, 2, 3)))


def test_position_of_other_images_is_removed_too():
    fit, scored = positional(8, 12, 14, 14), positional(8, 12, 14, 14)[:2] + 0.1 * draw(2, 12, 14, 14, seed=9)
    residual = Rasa(3, standardize=True).fit(fit).transform(scored)
    mask = (np.arange(196).reshape(14, 14) % 3) == 0
    before, after = (
        fit_probe(m[0].movedim(0, -1), mask, {"t": ramp("lr+ud", (14, 14))}, Fit())["t"].r2_heldout
        for m in (scored, residual)
    )
    assert before > 0.25
    assert after < 0.1


def test_wrong_input_is_an_error():
    maps = positional()
    cases = [
        (OptionError, r"rounds needs an integer of 0 or more, got rounds=-1", lambda: Rasa(-1)),
        (OptionError, r"rounds needs an integer of 0 or more, got rounds=1.5", lambda: Rasa(1.5)),
        (OptionError, r"order must be one of .*, got 'qr'", lambda: Rasa(order="qr")),
        (OptionError, r"activation must be one of", lambda: Rasa(activation="relu")),
        (OptionError, r"rounds must be below 4.5 for 9 channels", lambda: fit_rasa(maps, 5)),
        (OptionError, r"rounds must be in 0 to 1, got 2", lambda: fit_rasa(maps, 1).first(2)),
        (OptionError, r"alpha needs a number of 0 or more, got alpha=-0.1", lambda: Rasa(alpha=-0.1)),
        (OptionError, r"Call fit first", lambda: Rasa().transform(maps)),
        (InputError, r"must be finite", lambda: fit_rasa(maps * float("nan"), 1)),
        (
            InputError,
            r"more tokens than channels without a penalty, got 9 tokens of 9",
            lambda: fit_rasa(draw(3, 3, 9), 1),
        ),
        (InputError, r"floating point, got torch.int64", lambda: fit_rasa(maps.long(), 1)),
        (ShapeError, r"with coords, got \(56, 9\)", lambda: fit_rasa(draw(56, 9), 1)),
        (ShapeError, r"coords must be \(56, outputs\)", lambda: fit_rasa(maps, 1, coords=draw(3, 2))),
        (ShapeError, r"a list must have maps", lambda: fit_rasa([maps], 1)),
        (ShapeError, r"a list must have maps", lambda: fit_rasa([], 1)),
        (ShapeError, r"same channels, got \[4, 5\]", lambda: fit_rasa([draw(5, 5, 4), draw(5, 5, 5)], 1)),
        (ShapeError, r"9 channels along axis 1", lambda: fit_rasa(maps, 1).apply(draw(1, 8, 3, 3))),
    ]
    for error, words, call in cases:
        with pytest.raises(error, match=words):
            call()


def test_rounds_without_remaining_variation_name_themselves():
    maps = (grid_coords((6, 7)) @ draw(2, 9)).mT.reshape(1, 9, 6, 7)
    fit_rasa(maps, 1)
    with pytest.raises(InputError, match=r"round 2 needs features that vary in 2 directions, got 0"):
        fit_rasa(maps, 2)
