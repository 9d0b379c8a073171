"""Launches skip Triton's inspection of arguments only if the same kernel would be compiled."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from tests.attention.triton.compiled.calls import BUILDERS
from tests.attention.triton.compiled.stand_in_driver import stand_in_gpu
from vispe import Grid, attention
from vispe.attention import DistanceBias
from vispe.attention.backends.triton.content import decomposed_op
from vispe.attention.backends.triton.coords import launch as launch_coords
from vispe.attention.backends.triton.grid import launch, launch_backward
from vispe.attention.backends.triton.grid.column_tiles import aligned


class Kernel:
    """A kernel of two operands, two numbers and two constants, which records inspections and launches."""

    arg_names = ("X", "Y", "n", "c", "A", "B")

    def __init__(self):
        self.inspected, self.launched = [], []

    def __getitem__(self, grid):
        def inspect(*args, **constants):
            self.inspected.append((grid, args, constants))
            return Compiled(self)

        return inspect


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.launched.append((grid, args))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "_LAUNCHERS", {})
    monkeypatch.setattr(launch, "INTERPRETED", True)  # no driver
    return Kernel()


OPERANDS = torch.zeros(8), torch.zeros(8, dtype=torch.int32)
CONSTANTS = {"B": True, "num_warps": 4, "A": 16}


def test_arguments_of_a_repeated_launch(kernel):
    for _ in range(3):
        launch.launch(kernel, 6, OPERANDS, (3, 0.5), CONSTANTS)
    others = torch.ones(8), torch.ones(8, dtype=torch.int32)
    launch.launch(kernel, 6, others, (3, 0.5), CONSTANTS)
    assert len(kernel.inspected) == 1
    assert kernel.inspected[0][0] == (6, 1, 1)
    assert [grid for grid, _ in kernel.launched] == [(6, 1, 1)] * 3
    for operands, (_, args) in zip((OPERANDS, OPERANDS, others), kernel.launched, strict=True):
        assert args[0] is operands[0]
        assert args[1] is operands[1]
        assert args[2:] == (3, 0.5, 16, True)


@pytest.mark.parametrize(
    "changed",
    [
        {"programs": 7},
        {"programs": (6, 1, 2)},
        {"operands": (OPERANDS[0].double(), OPERANDS[1])},
        {"operands": (OPERANDS[0], torch.zeros(9, dtype=torch.int32)[1:])},
        {"numbers": (16, 0.5)},
        {"numbers": (3, 0.25)},
        {"constants": CONSTANTS | {"A": 32}},
        {"constants": CONSTANTS | {"num_warps": 8}},
        {"constants": CONSTANTS | {"maxnreg": 128}},
        {"kernel": Kernel()},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_other_arguments_are_inspected(changed, kernel):
    arguments = {"programs": 6, "operands": OPERANDS, "numbers": (3, 0.5), "constants": CONSTANTS}
    launch.launch(kernel, **arguments)
    other = changed.get("kernel", kernel)
    for _ in range(2):
        launch.launch(**{"kernel": kernel, **arguments, **changed})
    assert len(kernel.inspected) + len(other.inspected) * (other is not kernel) == 2
    launch.launch(kernel, **arguments)
    assert kernel.launched[-1][1][2:] == (3, 0.5, 16, True)


def test_another_device_is_inspected(kernel, monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(launch, "driver", Driver(device))
        launch.launch(kernel, 6, OPERANDS, (3, 0.5), CONSTANTS)
    assert len(kernel.inspected) == 2


class Driver:
    def __init__(self, device):
        self.active, self.device = self, device

    def get_current_device(self):
        return self.device


def test_the_number_of_remembered_launches_is_limited(kernel, monkeypatch):
    monkeypatch.setattr(launch, "MAX_LAUNCHERS", 5)
    for n in range(20):
        launch.launch(kernel, 6, OPERANDS, (n, 0.5), CONSTANTS)
        assert len(launch._LAUNCHERS) <= 5


def test_repeated_launches_have_the_arguments_of_triton(fresh_kernels, monkeypatch):
    monkeypatch.setattr(launch, "_LAUNCHERS", {})
    grid = Grid((3, 5), 1)
    bias = DistanceBias((0.5, 0.25), grid.positions())
    q = torch.randn(1, 2, grid.tokens, 16, dtype=torch.bfloat16)
    arguments = []
    with stand_in_gpu(90) as gpu, torch.no_grad():
        for _ in range(2):
            attention(q, q, q, bias=bias, backend="triton")
            arguments.append(gpu.arguments)
    inspected, repeated = arguments
    assert len(inspected) == len(repeated) > 40
    for a, b in zip(inspected, repeated, strict=True):
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        elif type(a).__name__ != "LazyDict":  # for profilers
            assert a == b


@pytest.mark.parametrize("width", [8, 72, 88])
def test_unaligned_rows_are_copied(width):
    x = torch.randn(2, 5, 3, width + 8).half()
    for view in (x, x[..., 8:], x[:1, :, :1, :width], x.transpose(1, 2)[..., :width]):
        assert aligned(view)[0] is view
    for view in (x[..., 1 : width + 1], torch.randn(2, 5, 3, width + 1).half()[..., :width]):
        (copy,) = aligned(view)
        assert copy.is_contiguous()
        assert torch.equal(copy, view)
    # kernels do not assume alignment of other widths
    odd = torch.randn(2, 5, 3, 17).half()[..., 1:]
    assert aligned(odd)[0] is odd


@pytest.mark.parametrize(
    ("family", "bias"), [("grid", "table"), ("coords", "table"), ("decomposed", "query")]
)
def test_kernels_get_aligned_rows(fresh_kernels, monkeypatch, family, bias):
    grid, launched = Grid((3, 4), 1), []

    def spy(kernel, programs, operands, *rest):
        launched.extend(x for x in operands if x.ndim == 4 and x.shape[-1] == 72)

    for module in (launch, launch_backward, launch_coords, decomposed_op):
        monkeypatch.setattr(module, "launch", spy)
    q, k, v = (
        torch.randn(2, grid.tokens, 2, 73).half()[..., 1:].transpose(1, 2).requires_grad_() for _ in range(3)
    )
    with stand_in_gpu(90, compiles=False):
        out = attention(q, k, v, bias=BUILDERS[family](bias, grid, 2, 2), backend="triton")
        out.backward(torch.ones(2, 2, grid.tokens, 73).half()[..., 1:])
    # q, k, v and the output; those and the gradients, for each backward kernel
    assert len(launched) > 12
    assert all(aligned(x)[0] is x for x in launched)


def test_tiles_cover_each_token_once():
    """The division in kernels: whole tiles of patches, then narrow ones; queries in one partial tile, not three."""
    for (of, narrow), size, prefix in product(
        (("queries", 16), ("keys", 32), ("few keys", 16)), (64, 128), (0, 1, 5)
    ):
        for patches in range(1, 300):
            remaining = prefix + patches % size
            count = patches // size
            if of == "queries" and remaining > 2 * narrow:
                remaining, count = remaining - size, count + 1
            while remaining > 0:
                remaining, count = remaining - narrow, count + 1
            assert launch.tiles_of(prefix + patches, prefix, size, of) == count
