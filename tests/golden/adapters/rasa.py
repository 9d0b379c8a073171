"""Golden cases of RASA: removal in rounds, the loss of one round, and the joint projection."""

import torch

from vispe.evaluate.probe.rasa.projection import RasaProjection
from vispe.evaluate.probe.rasa.rounds import (
    authors_projector,
    grid_coords,
    joint_projector,
    predict_coords,
    rasa_loss,
    remove_rounds,
    round_directions,
)


def run(case):
    yield from {"remove": removed, "loss": loss, "joint": joint}[case.config("kind")](case)


def leaf(tensor):
    return tensor.double().requires_grad_()


def checked_sizes(case, x, weights=None):
    """Read the sizes of the configuration, and compare them with the arrays."""
    sizes = dict(zip(("batch", "tokens", "dim"), x.shape, strict=True))
    if weights is not None:
        sizes |= dict(zip(("rounds", "outputs"), weights.shape[:2], strict=True))
    for name, size in sizes.items():
        if case.config(name, size) != size:
            raise ValueError(f"{name} is {case.config(name)} in the configuration and {size} in the arrays")


def removed(case):
    x, weights = leaf(case.input("x")), leaf(case.param("weights"))
    checked_sizes(case, x, weights)
    directions = round_directions(weights)
    residual, last = remove_rounds(x, directions)
    outputs = {"x": residual, "last_position": last, "directions": directions}
    outputs["projector"] = authors_projector(directions)
    if "cotangent" in case.inputs:
        residual.backward(case.input("cotangent").double())
        outputs |= {
            "grad.x": x.grad,
            "grad.weights": torch.zeros_like(weights) if weights.grad is None else weights.grad,
        }
    yield "functions", outputs
    projection = RasaProjection(weights.detach(), order="authors")
    applied = projection.apply(case.input("x").double())
    yield "class", {"x": applied, "directions": projection.directions, "projector": projection.matrix}
    yield "linear", {"x": projection.as_linear(torch.float64)(x)}


def loss(case):
    x, regressor = case.input("x").double(), leaf(case.param("regressor"))
    shape, activation = (case.config("height"), case.config("width")), case.config("activation")
    activation = activation or "none"
    checked_sizes(case, x)
    weights = torch.zeros(0, len(regressor), x.shape[-1], dtype=torch.float64)
    if "weights" in case.params:
        weights = case.param("weights").double()
    if case.config("removed_rounds", len(weights)) != len(weights):
        raise ValueError(f"removed_rounds is not that of the {len(weights)} rounds of the case")
    residual, _ = remove_rounds(x, round_directions(weights))
    coords = grid_coords(shape)
    value = rasa_loss(residual, regressor, coords, activation)
    value.backward()
    prediction = predict_coords(residual, regressor, activation)
    outputs = {"residual": residual, "target": coords, "prediction": prediction}
    yield activation, outputs | {"loss": value.reshape(1), "grad.regressor": regressor.grad}


def joint(case):
    x, weights = case.input("x").double(), case.param("weights").double()
    checked_sizes(case, x, weights)
    projector = joint_projector(weights)
    yield "functions", {"projector": projector, "x": x @ projector.mT}
    projection = RasaProjection(weights, order="joint")
    yield "class", {"projector": projection.matrix, "x": projection.apply(x)}
    yield "linear", {"x": projection.as_linear(torch.float64)(x)}
