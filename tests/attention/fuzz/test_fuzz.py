"""A sample of the random calls, and whether the comparison detects errors."""

import pytest
import torch

from tests.attention.fuzz.judge import Judge
from tests.attention.fuzz.random_calls import RandomCall
from tests.cases import cases
from vispe.errors import BackendUnavailable


def failures_of(seed, small=True):
    call = RandomCall(seed, small=small)
    judge, failures = Judge(call), {}
    for backend in call.backends():
        try:
            failed = judge.errors(backend)[1]
        except BackendUnavailable:
            continue
        if failed:
            failures[backend] = failed
    return call.label, failures


@cases("seed", range(60))
def test_random_calls(seed):
    label, failures = failures_of(seed)
    assert not failures, label


@pytest.mark.slow
@cases("seed", range(100, 160))
def test_larger_calls(seed):
    label, failures = failures_of(seed, small=False)
    assert not failures, label


@cases("seed", range(60, 80))
def test_errors_are_detected(seed, monkeypatch):
    """A shift by one token, a factor, and a missing gradient."""
    call = RandomCall(seed, small=True)
    judge, run = Judge(call), RandomCall.run
    changes = [lambda out: out * 1.5]
    if call.views(call.leaves)[0].shape[2] > 4 and float(judge.expected["output"].diff(dim=2).norm()) > 0.1:
        changes.append(lambda out: out.roll(1, 2))
    if any(t.requires_grad for t in call.inputs()) and judge.largest > 0:
        changes.append(lambda out: out.detach().requires_grad_())
    for change in changes:
        monkeypatch.setattr(RandomCall, "run", lambda *a, f=change: (f(run(*a)[0]), *run(*a)[1:]))
        if float(judge.expected["output"].norm()) > 0:
            assert judge.errors("auto")[1], call.label


def test_seeds_are_reproducible():
    first, second = RandomCall(3, small=True), RandomCall(3, small=True)
    assert first.label == second.label
    assert all(torch.equal(a, b) for a, b in zip(first.inputs(), second.inputs(), strict=True))
