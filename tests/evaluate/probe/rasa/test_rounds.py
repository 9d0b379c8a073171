import json

import numpy as np
import pytest
import torch

from tests.golden.runner import run_case
from vispe.errors import InputError, OptionError, ShapeError
from vispe.evaluate.probe.rasa.rounds import (
    authors_projector,
    grid_coords,
    joint_projector,
    predict_coords,
    rasa_loss,
    remove_rounds,
    round_directions,
)

SEEDS = range(12)


def rng(seed=0):
    return np.random.default_rng([77, seed])


def sizes(seed):
    """Return random (rounds, outputs, channels, tokens), rounds and outputs from the smallest on."""
    r = rng(seed)
    rounds, outputs = int(r.integers(0, 5)), int(r.integers(1, 4))
    return rounds, outputs, int(r.integers(outputs, 14)), int(r.integers(1, 20))


def slow_directions(weights):
    """Gram-Schmidt of every round with Python loops over channels."""
    result = np.zeros_like(weights)
    for k, rows in enumerate(weights):
        for i, row in enumerate(rows):
            v = [value / sum(w * w for w in row) ** 0.5 for value in row]
            for j in range(i):
                dot = sum(a * b for a, b in zip(v, result[k, j], strict=True))
                v = [a - dot * b for a, b in zip(v, result[k, j], strict=True)]
            norm = sum(a * a for a in v) ** 0.5
            result[k, i] = [a / norm for a in v]
    return result


def slow_remove(x, directions):
    """Remove directions from every token, one round after the other, with loops."""
    x, last = x.copy(), np.zeros_like(x)
    for basis in directions:
        for n, token in enumerate(x):
            components = [float(token @ d) for d in basis]
            last[n] = sum(c * d for c, d in zip(components, basis, strict=True))
        x = x - last
    return x, last


@pytest.mark.parametrize("seed", SEEDS)
def test_rounds_equal_loops_and_the_projector_their_product(seed):
    rounds, outputs, c, n = sizes(seed)
    weights, x = rng(seed).standard_normal((rounds, outputs, c)), rng(seed + 99).standard_normal((n, c))
    expected = slow_directions(weights)
    directions = round_directions(torch.from_numpy(weights))
    np.testing.assert_allclose(directions.numpy(), expected, atol=1e-8)
    residual, last = remove_rounds(torch.from_numpy(x), directions)
    residual_by_hand, expected_last = slow_remove(x, expected)
    np.testing.assert_allclose(residual.numpy(), residual_by_hand, atol=1e-7)
    np.testing.assert_allclose(last.numpy(), expected_last, atol=1e-7)
    product = np.eye(c)
    for basis in expected:
        product = (np.eye(c) - basis.T @ basis) @ product
    np.testing.assert_allclose(authors_projector(directions).numpy(), product, atol=1e-7)
    np.testing.assert_allclose(x @ product.T, residual_by_hand, atol=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_joint_projection_is_symmetric_idempotent_and_free_of_order(seed):
    rounds, outputs, c, n = sizes(seed)
    weights = torch.from_numpy(rng(seed).standard_normal((rounds, outputs, c)))
    p = joint_projector(weights)
    torch.testing.assert_close(p, p.mT)
    torch.testing.assert_close(p @ p, p)
    assert int(torch.linalg.matrix_rank(p, atol=1e-9, rtol=0)) == max(c - rounds * outputs, 0)
    order = torch.from_numpy(rng(seed + 1).permutation(rounds))
    torch.testing.assert_close(joint_projector(weights[order].flip(1)), p)
    rows = weights.flatten(0, 1)
    torch.testing.assert_close(p, torch.eye(c).double() - torch.linalg.pinv(rows) @ rows)
    # scale of the weights, and repeated weight vectors, have no effect
    torch.testing.assert_close(joint_projector(torch.cat([weights, 1e-9 * weights])), p)
    if rounds:
        x = torch.from_numpy(rng(seed + 2).standard_normal((n, c)))
        assert (x @ p.mT @ rows.mT).abs().max() < 1e-9 * rows.abs().sum()


def test_the_product_of_rounds_is_not_a_projection_but_the_joint_one_is():
    weights = torch.from_numpy(rng(5).standard_normal((3, 2, 8)))
    p = authors_projector(round_directions(weights))
    assert (p - p.mT).abs().max() > 0.05
    assert (p @ p - p).abs().max() > 0.02
    # one round is the same in both
    torch.testing.assert_close(authors_projector(round_directions(weights[:1])), joint_projector(weights[:1]))


@pytest.mark.parametrize("shape", [(1,), (5,), (1, 4), (3, 1), (4, 4), (3, 5), (2, 3, 4), (1, 1, 2)])
def test_coordinates_of_every_axis_are_over_its_own_length(shape):
    coords = grid_coords(shape)
    for row, index in zip(coords, np.ndindex(shape), strict=True):
        expected = [i / (n - 1) if n > 1 else 0.0 for i, n in zip(index, shape, strict=True)]
        assert row.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "none"])
@pytest.mark.parametrize("seed", SEEDS)
def test_loss_and_gradient_equal_the_formula(seed, activation):
    r = rng(seed)
    shape, b, c = tuple(r.integers(1, 6, 2)), int(r.integers(1, 4)), int(r.integers(2, 9))
    x, w = r.standard_normal((b, shape[0] * shape[1], c)), r.standard_normal((2, c))
    function = {"sigmoid": lambda s: 1 / (1 + np.exp(-s)), "tanh": np.tanh, "none": lambda s: s}[activation]
    slope = {"sigmoid": lambda y: y * (1 - y), "tanh": lambda y: 1 - y * y, "none": np.ones_like}[activation]
    total, grad = 0.0, np.zeros_like(w)
    for image in x:
        for token, t in zip(image, grid_coords(shape).numpy(), strict=True):
            y = function(w @ token)
            total += ((y - t) ** 2).sum() / (b * len(image) * 2)
            grad += np.outer(2 * (y - t) * slope(y), token) / (b * len(image) * 2)
    regressor = torch.from_numpy(w).requires_grad_()
    loss = rasa_loss(torch.from_numpy(x), regressor, grid_coords(shape), activation)
    loss.backward()
    assert loss.item() == pytest.approx(total)
    np.testing.assert_allclose(regressor.grad.numpy(), grad, atol=1e-12)
    # without a bias, features of 0 are at the centre of a sigmoid
    zero = predict_coords(torch.zeros(1, c).double(), regressor, activation)
    assert zero.tolist() == [[0.5 if activation == "sigmoid" else 0.0] * 2]


def test_dependent_weight_vectors_name_their_round():
    weights = torch.from_numpy(rng().standard_normal((3, 2, 6)))
    for scale in (1.0, -3.7, 1e-200, 1e200, 0.0, float("nan")):
        wrong = weights.clone()
        wrong[1, 1] = scale * wrong[1, 0]
        with pytest.raises(InputError, match="weight vectors of round 2 must be linearly independent"):
            round_directions(wrong)
    tiny = weights.clone()
    tiny[2] *= 1e-150
    torch.testing.assert_close(round_directions(tiny), round_directions(weights))


def test_wrong_shapes_and_names_are_errors():
    with pytest.raises(ShapeError, match=r"weights must be \(rounds, outputs, C\), got \(2, 6\)"):
        round_directions(torch.ones(2, 6))
    with pytest.raises(ShapeError, match=r"directions must be \(rounds, outputs, 6\), got \(1, 2, 5\)"):
        remove_rounds(torch.ones(3, 6), torch.ones(1, 2, 5))
    with pytest.raises(ShapeError, match=r"coords must be \(tokens, outputs\) = \(12, 2\), got \(9, 2\)"):
        rasa_loss(torch.ones(1, 12, 4), torch.ones(2, 4), grid_coords((3, 3)))
    with pytest.raises(OptionError, match="activation must be one of sigmoid, tanh, none, got 'relu'"):
        predict_coords(torch.ones(1, 4), torch.ones(2, 4), "relu")
    with pytest.raises(ShapeError, match=r"at least one token per axis, got \(0, 3\)"):
        grid_coords((0, 3))


def write(path, config, arrays):
    meta = {"encoding": "rasa", "config": config, "tolerance": {"rtol": 1e-5, "atol": 1e-6}}
    np.savez(
        path, meta=np.array(json.dumps(meta)), **{k: np.asarray(v, np.float32) for k, v in arrays.items()}
    )
    result = run_case(path)
    assert result.status == "PASS", str(result)


@pytest.mark.parametrize("seed", SEEDS)
def test_golden_cases_of_any_size_pass(seed, tmp_path):
    """All kinds of golden cases, with expected values from loops."""
    rounds, outputs, c, n = sizes(seed)
    r = rng(seed + 300)
    b = int(r.integers(1, 4))
    x = r.standard_normal((b, n, c)).astype(np.float32).astype(np.float64)
    w = r.standard_normal((rounds, outputs, c)).astype(np.float32).astype(np.float64)
    directions = slow_directions(w)
    flat, last = slow_remove(x.reshape(-1, c), directions)
    product = np.eye(c)
    for basis in directions:
        product = (np.eye(c) - basis.T @ basis) @ product
    config = {"kind": "remove", "rounds": rounds, "outputs": outputs, "batch": b, "tokens": n, "dim": c}
    arrays = {"in.x": x, "param.weights": w, "out.x": flat.reshape(x.shape), "out.projector": product}
    arrays |= {"out.last_position": last.reshape(x.shape), "out.directions": directions}
    write(tmp_path / "rasa__remove.npz", config, arrays)
    rows = w.reshape(-1, c)
    projector = np.eye(c) - np.linalg.pinv(rows) @ rows
    config = {"kind": "joint", "rounds": rounds, "batch": b, "tokens": n, "dim": c}
    arrays = {"in.x": x, "param.weights": w, "out.projector": projector, "out.x": x @ projector}
    write(tmp_path / "rasa__joint.npz", config, arrays)
    activation = ("sigmoid", "tanh", "none")[seed % 3]
    h, width = int(r.integers(1, 5)), int(r.integers(1, 5))
    x = r.standard_normal((b, h * width, c)).astype(np.float32).astype(np.float64)
    residual = slow_remove(x.reshape(-1, c), directions)[0].reshape(x.shape)
    target = [[i / max(h - 1, 1), j / max(width - 1, 1)] for i in range(h) for j in range(width)]
    regressor = r.standard_normal((2, c)).astype(np.float32).astype(np.float64)
    logits = residual @ regressor.T
    y = {"sigmoid": 1 / (1 + np.exp(-logits)), "tanh": np.tanh(logits), "none": logits}[activation]
    slope = {"sigmoid": y * (1 - y), "tanh": 1 - y * y, "none": np.ones_like(y)}[activation]
    grad = np.einsum("bnk,bnc->kc", 2 * (y - target) * slope / y.size, residual)
    config = {"kind": "loss", "height": h, "width": width, "batch": b, "dim": c, "removed_rounds": rounds}
    arrays = {"in.x": x, "param.regressor": regressor, "out.residual": residual, "out.target": target}
    arrays |= {"out.prediction": y, "out.loss": [((y - target) ** 2).mean()], "out.grad.regressor": grad}
    arrays |= {"param.weights": w} if rounds else {}
    write(tmp_path / "rasa__loss.npz", config | {"activation": activation}, arrays)
