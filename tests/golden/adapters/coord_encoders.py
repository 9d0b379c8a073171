"""Golden cases of encoders of free coordinates."""

import numpy as np

import vispe


def run(case):
    kinds = {"shifted_gaussian": _shifted_gaussian, "sine3d": _sine3d, "spder": _spder}
    yield from kinds[case.config("kind")](case)


def _shifted_gaussian(case):
    for name in ("grid", "seed"):
        case.ignore(name, "the points are given")
    points, centres, x = case.config("centres_per_axis"), case.input("centres").flatten(), case.input("x")
    options = {"sigma": case.config("sigma"), "divisor": "batch", "axes": x.shape[1]}
    inputs = vispe.create_encoding(
        "shifted_gaussian", dim=x.shape[1] * len(centres), centres=centres.tolist(), **options
    )
    yield "given", {"pe": inputs.encode(x)}
    even = vispe.create_encoding("shifted_gaussian", dim=x.shape[1] * points, centres=points, **options)
    if case.close(np.array(even.centre_points()), centres.numpy()).all():
        yield "even", {"pe": even.encode(x)}


def _sine3d(case):
    case.ignore("seed", "the points are given")
    features = case.config("num_pos_feats")
    encoding = vispe.create_encoding(
        "sincos3d_points",
        dim=3 * features,
        features=features,
        temperature=case.config("temperature"),
        mlp=False,
    )
    points = case.input("points")
    yield "encode", {"pe": encoding.encode(points)}
    free = vispe.Positions(points.flip(-1).reshape(-1, points.shape[-2], 3))
    unnormalized = vispe.create_encoding({**encoding.config, "normalize": False})
    yield "table", {"pe": unnormalized.table(free).reshape(*points.shape[:-1], -1)}


def _spder(case):
    for name in ("seed", "is_first"):
        case.ignore(name, "the parameters are given")
    encoding = vispe.create_encoding(
        "spder",
        dim=case.config("out_features"),
        axes=case.config("in_features"),
        omega=case.config("omega_0"),
        project=False,
    )
    encoding.load_state_dict({f"sines.0.{name}": case.param(name) for name in case.params})
    # float64: gradients are sums in which float32 leaves the rounding of the largest terms
    encoding.double()
    x = case.input("x").double().requires_grad_()
    y = encoding.encode(x)
    case.backward(cotangent=y)
    grads = {f"grad.{n}": getattr(encoding.sines[0], n).grad for n in ("weight", "bias")}
    result = {"y": y, "grad.x": x.grad, **grads}
    yield "encode", {name: value for name, value in result.items() if name in case.output_names}
