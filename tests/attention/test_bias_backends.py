"""Every bias on every backend in every dtype, and the derivatives of the reference.

The backend of fused kernels refuses on a CPU; `tests/attention/triton/check_matrix.py` has the same in Triton's
interpreter.
"""

import itertools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests.attention.bias_matrix import (
    DERIVED,
    EXACT,
    METRICS,
    NORMS,
    ROUNDED,
    agrees_or_refuses,
    derived_agrees_or_refuses,
    distance,
)
from tests.attention.cases import CASES, tensors
from tests.cases import cases, pairwise
from vispe import Grid, attention
from vispe.attention.automatic_backend import BACKENDS

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LIMITS = {"reference": EXACT}
DISTANCES = list(itertools.product(METRICS, (False, True), NORMS))
GRID = Grid((3, 4), 2)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pairwise
@cases("dtype", DTYPES, ids=str)
@cases("backend", BACKENDS)
@cases("name", CASES)
def test_each_bias_agrees_or_is_refused(name, backend, dtype):
    pos = GRID.positions()
    refusal = agrees_or_refuses(CASES[name](pos, 2), backend, dtype, pos, limits=LIMITS.get(backend, ROUNDED))
    assert refusal is None or backend not in ("reference", "sdpa")


@cases("backend", BACKENDS)
@cases("number", range(len(DISTANCES)), ids=lambda i: "-".join(map(str, DISTANCES[i])))
def test_every_distance(number, backend):
    pos = GRID.positions()
    case = distance(pos, *DISTANCES[number], learned=number % 5 < 2)
    agrees_or_refuses(case, backend, torch.float32, pos, limits=LIMITS.get(backend, ROUNDED))


@cases("spec", DERIVED)
def test_biases_derived_by_encodings(spec):
    assert not {"reference"} & set(derived_agrees_or_refuses(spec, BACKENDS, LIMITS))


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives_of_the_reference(name, float64):
    pos = Grid((2, 3), 1).positions()
    case = CASES[name](pos, 1)
    leaves = [*tensors(1, pos.tokens, dtype=torch.float64), *case.params]

    def attend(q, k, v, *_):
        return attention(q, k, v, bias=case.bias, backend="reference")

    assert gradcheck(attend, leaves, fast_mode=True)
    assert gradgradcheck(attend, leaves, fast_mode=True)
