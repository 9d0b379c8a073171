"""Cache of eval mode: cached values equal computed ones."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import Tensor

import vispe
from tests.cases import cases
from vispe.grid import Grid

SPECS = ("liere", "comrope_ap", "comrope_ld(form=folded)", "rope_mixed", "grape", "grape(planes=rank2)")
SPECS += ("lightnet(learned=true)", "rpb_cpb", "seqpe")
GRID = Grid((3, 5), prefix=1)


def build(spec: str) -> vispe.Encoding:
    torch.manual_seed(0)
    encoding = vispe.create_encoding(spec, dim=48, num_heads=3, grid=(3, 5)).eval()
    for p in encoding.parameters():
        torch.nn.init.normal_(p)
    return encoding


def read(encoding: vispe.Encoding, pos: vispe.Positions) -> Tensor:
    """Return the bias of these positions, or queries after their transform."""
    q = torch.linspace(-1, 1, pos.tokens * 16).reshape(1, 1, -1, 16).expand(1, 3, -1, -1)
    bias = encoding.bias(pos, 0) if isinstance(encoding, vispe.encodings.base.Biased) else None
    if bias is not None:
        return bias.dense()
    return encoding.transform(pos, 0).query(q)


@cases("spec", SPECS)
def test_stored_equals_computed(spec: str) -> None:
    encoding, pos = build(spec), GRID.positions()
    with torch.enable_grad():
        expected = read(encoding, pos).detach()
    with torch.no_grad():
        assert torch.equal(read(encoding, pos), expected)
        entry = encoding._eval_cache.entry
        assert torch.equal(read(encoding, pos), expected)
        assert encoding._eval_cache.entry is entry, "the second pass computed it again"
        other = Grid((4, 2), prefix=1).positions()
        assert read(encoding, other).shape[2] == 9
        assert torch.equal(read(encoding, GRID.positions()), expected)


@cases("spec", SPECS)
def test_any_change_of_parameters_invalidates_the_cache(spec: str) -> None:
    encoding, pos = build(spec), GRID.positions()
    with torch.inference_mode():
        first = read(encoding, pos).clone()
    for p in encoding.parameters():
        p.data.mul_(0.5)  # this way, autograd's version counter does not move
    with torch.no_grad():
        second = read(encoding, pos).clone()
        assert not torch.equal(first, second)
        assert read(encoding.double(), pos).dtype == read(build(spec).double(), pos).dtype
    fresh = build(spec)
    fresh.load_state_dict(encoding.float().state_dict())
    assert torch.equal(read(fresh, pos).detach(), second)


@cases(
    "spec", ["fope", "rope_mixed(trainable=false)", "rope_muvit(trainable=false)", "rose(trainable=false)"]
)
def test_loaded_buffers_are_read(spec: str) -> None:
    """Frequencies and matrices that are not trained are buffers, which a checkpoint replaces as well."""
    encoding, pos = build(spec), GRID.positions()
    with torch.no_grad():
        first = read(encoding, pos)
        encoding.load_state_dict({name: value * 0.9 for name, value in encoding.state_dict().items()})
        second = read(encoding, pos)
        assert not torch.equal(first, second)
        assert torch.equal(second, read(copy.deepcopy(encoding), pos))


@cases("spec", [*SPECS, "fope"])
def test_autocast_does_not_round_tables(spec: str) -> None:
    encoding, pos = build(spec), GRID.positions()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        read(encoding.train(), pos)  # computed, not cached
        first = read(encoding.eval(), pos).float()
    expected = read(build(spec), GRID.positions()).detach()
    torch.testing.assert_close(first, expected, rtol=2e-2, atol=2e-2)
    with torch.no_grad():
        torch.testing.assert_close(read(encoding, pos), expected)


@cases("spec", SPECS)
def test_training_and_gradients_after_prediction(spec: str) -> None:
    encoding, pos = build(spec), GRID.positions()
    with torch.inference_mode():
        read(encoding, pos)
    read(encoding, pos).square().sum().backward()
    assert all(p.grad is not None for p in encoding.parameters())


def test_copies_share_nothing() -> None:
    encoding, pos = build("liere"), GRID.positions()
    with torch.no_grad():
        first = read(encoding, pos)
        for copied in (copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding))):
            assert copied._eval_cache.entry is None
            assert torch.equal(read(copied, pos), first)


def test_ensembles_under_vmap() -> None:
    models, pos = [build("liere") for _ in range(2)], GRID.positions()
    torch.nn.init.zeros_(models[1].skew)
    params, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    base = copy.deepcopy(models[0])
    call = _Read(base, pos)
    with torch.no_grad():
        named = {f"encoding.{k}": v for k, v in params.items()}
        both = torch.vmap(lambda p: torch.func.functional_call(call, (p, buffers), ()))(named)
        for out, model in zip(both, models, strict=True):
            torch.testing.assert_close(out, read(model, pos))


class _Read(torch.nn.Module):
    def __init__(self, encoding: vispe.Encoding, pos: vispe.Positions) -> None:
        super().__init__()
        self.encoding, self.pos = encoding, pos

    def forward(self) -> Tensor:
        return read(self.encoding, self.pos)
