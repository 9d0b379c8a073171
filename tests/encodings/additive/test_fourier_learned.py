"""fourier_learned: values by loops, the three initialisations, groups, class vector, and refusals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import cases
from vispe import Grid, create_encoding
from vispe.errors import OptionError, ShapeError


def lff(dim=12, dtype=torch.float64, **options):
    return create_encoding("fourier_learned", dim=dim, **options).to(dtype)


def slow(encoding, x):
    """Return the code (d,) of one point's coordinates, following the algorithm of the paper."""
    groups = encoding.groups
    each = len(x) // groups
    out = []
    for g in range(groups):
        mine = x[g * each : (g + 1) * each]
        r = [sum(w * p for w, p in zip(row, mine, strict=True)) for row in encoding.frequency.weight.tolist()]
        f = [v / math.sqrt(2 * len(r)) for v in [*(math.cos(a) for a in r), *(math.sin(a) for a in r)]]
        first, second = encoding.mlp
        hidden = [
            sum(w * v for w, v in zip(row, f, strict=True)) + b
            for row, b in zip(first.weight.tolist(), first.bias.tolist(), strict=True)
        ]
        hidden = [h * 0.5 * (1 + math.erf(h / math.sqrt(2))) for h in hidden]
        out += [
            sum(w * v for w, v in zip(row, hidden, strict=True)) + b
            for row, b in zip(second.weight.tolist(), second.bias.tolist(), strict=True)
        ]
    return out


@cases(("axes", "groups"), [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 3)])
def test_values_and_gradients(axes, groups):
    torch.manual_seed(axes)
    encoding = lff(axes=axes, groups=groups, features=6, hidden=5)
    x = torch.randn(2, 3, axes, dtype=torch.float64, requires_grad=True)
    actual = encoding.encode(x)
    assert actual.shape == (2, 3, 12)
    for b in range(2):
        for n in range(3):
            assert actual[b, n].tolist() == pytest.approx(slow(encoding, x[b, n].tolist()), abs=1e-12)
    assert torch.autograd.gradcheck(encoding.encode, x)
    cotangent = torch.randn_like(actual)
    actual.backward(cotangent)
    for parameter in encoding.parameters():  # against differences along a random direction
        probe, values = torch.randn_like(parameter), []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * 1e-6 * probe)
                values.append((encoding.encode(x) * cotangent).sum().item())
                parameter.sub_(sign * 1e-6 * probe)
        expected = (parameter.grad * probe).sum().item()
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(expected, rel=1e-4, abs=1e-7)


@cases(
    ("options", "std"),
    [
        ({}, 5.0),
        ({"init": "paper", "gamma": 4.0}, 0.25),
        ({"init": "willguimont", "gamma": 4.0}, 1 / 16),
        ({"init": "jhlew", "gamma": 4.0}, 16.0),
        ({"freq_std": 0.3}, 0.3),
    ],
)
def test_initialisations(options, std):
    torch.manual_seed(0)
    encoding = create_encoding("fourier_learned", dim=4, features=40000, **options)
    assert encoding.std == pytest.approx(std)
    assert encoding.frequency.weight.std().item() == pytest.approx(std, rel=0.02)
    before = encoding.frequency.weight.detach().clone()
    encoding.reset_parameters()
    assert not torch.equal(before, encoding.frequency.weight)


def test_presets():
    for name, std in (("paper", 5.0), ("willguimont", 0.01), ("jhlew", 1.0), ("loope", 1.0)):
        encoding = create_encoding(f"fourier_learned.{name}", dim=12)
        assert encoding.std == pytest.approx(std)
        assert (encoding.vector is not None) == (name == "loope")
    # as the method's table says
    assert sum(p.numel() for p in lff(dim=768).parameters()) == 768 + 24608 + 25344


def test_gamma_is_a_length():
    torch.manual_seed(0)
    encoding = lff(features=40000, gamma=0.5)
    x = torch.tensor([[0.0, 0.0], [0.4, 0.0], [0.24, 0.32], [1.0, 0.0]], dtype=torch.float64)
    r = x @ encoding.frequency.weight.t()
    f = torch.cat([r.cos(), r.sin()], 1) / math.sqrt(40000)
    expected = [math.exp(-(d**2) / (2 * 0.25)) / 2 for d in (0, 0.4, 0.4, 1.0)]
    assert (f @ f[0]).tolist() == pytest.approx(expected, abs=0.01)


def test_class_vector_and_prefix():
    encoding = lff(class_vector=True, grid=(3, 4))
    assert (encoding.vector == 0).all()
    with torch.no_grad():
        encoding.vector.normal_()
    plain = lff(grid=(3, 4))
    plain.load_state_dict({k: v for k, v in encoding.state_dict().items() if k != "vector"})
    for prefix in (0, 1, 5):
        pos = Grid((3, 4), prefix=prefix).positions()
        table, without_prefix = encoding.table(pos), plain.table(pos)
        assert torch.equal(table[:, min(prefix, 1) :], without_prefix[:, min(prefix, 1) :])
        assert (without_prefix[:, :prefix] == 0).all()
        if prefix:
            assert torch.equal(table[0, 0], encoding.vector[0])
            keep = torch.tensor(
                [[*range(prefix), prefix + 7, prefix], [*range(prefix), prefix + 1, prefix + 4]]
            )
            subset = encoding.table(pos.gather(keep))
            for i in range(2):
                torch.testing.assert_close(subset[i], table[0, keep[i]])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(h=st.integers(1, 6), w=st.integers(1, 6))
def test_the_same_field_has_the_same_code_at_other_resolutions(h, w):
    encoding = lff(dtype=torch.float32)
    small = encoding.table(Grid((h, w)).positions())[0].reshape(h, w, 12)
    fine = encoding.table(Grid((3 * h, 3 * w)).positions())[0].reshape(3 * h, 3 * w, 12)
    torch.testing.assert_close(fine[1::3, 1::3], small, rtol=0, atol=1e-5)


def test_published_names():
    encoding = lff()
    state = {f"pe.{k}": v for k, v in encoding.state_dict().items()}
    state["pe.Wr.weight"] = state.pop("pe.frequency.weight")
    for last in ("weight", "bias"):
        state[f"pe.mlp.2.{last}"] = state.pop(f"pe.mlp.1.{last}")
    encoding.rename_checkpoint_keys(state, "", "pe.")
    assert set(state) == {f"pe.{k}" for k in encoding.state_dict()}
    untouched = dict(state)
    encoding.rename_checkpoint_keys(state, "", "pe.")
    assert state == untouched


def test_half_precision_parameters():
    low, exact = lff(dtype=torch.bfloat16), lff()
    exact.load_state_dict(low.state_dict())
    x = torch.rand(40, 2)
    result = low.encode(x)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), exact.encode(x.double()), rtol=0, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(low.encode(x), result)


@cases(
    ("options", "message"),
    [
        ({"init": "port"}, "init must be one of paper, willguimont, jhlew, got 'port'"),
        ({"gamma": 0}, "gamma needs a number above 0, got gamma=0"),
        ({"freq_std": -1}, "freq_std needs a number above 0, got freq_std=-1"),
        (
            {"freq_std": 1.0, "gamma": 2.0},
            "init and gamma have no effect with freq_std=1",
        ),
        ({"freq_std": 1.0, "init": "jhlew"}, "init and gamma have no effect with freq_std"),
        ({"features": 5}, "features needs an integer above 0 and divisible by 2, got features=5"),
        ({"hidden": 0}, "hidden needs an integer above 0, got hidden=0"),
        ({"groups": 3}, "groups must divide the 2 coordinates and dim=12, got groups=3"),
        ({"groups": 5, "axes": 5}, "groups must divide the 5 coordinates and dim=12, got groups=5"),
        ({"groups": 0}, "got groups=0"),
        ({"class_vector": 1}, "class_vector is true or false, got class_vector=1"),
        ({"axes": 0}, "axes needs an integer from 1 to 64, got axes=0"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(OptionError, match=message):
        lff(**options)


def test_shapes_are_checked():
    encoding = lff(axes=4, groups=2)
    with pytest.raises(ShapeError, match="fourier_learned needs 4-axis positions, got 2 axes"):
        encoding.table(Grid((3, 3)).positions())
    with pytest.raises(ShapeError, match=r"coordinates \(..., 4\), got \(3, 2\)"):
        encoding.encode(torch.zeros(3, 2))
