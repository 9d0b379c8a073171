"""Mutations of `eval/mutation`: each changes the code and preserves valid syntax."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

SOURCE = '''
def share(counts, total=None):
    """Return shares."""
    if total is None and counts:
        total = sum(counts)
    if total < 1:
        raise ValueError(f"total must be at least 1, got {total - 0}")
    counts.sort()
    return [
        -(n / total)  # of several lines
        for n in counts
    ]


@triton.jit
def kernel(x):
    return x + 1
'''


@pytest.fixture(scope="module")
def faults_of():
    path = Path(__file__).parents[1] / "eval/mutation/faults.py"
    spec = importlib.util.spec_from_file_location("faults_of_tests", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module.faults
    del sys.modules[spec.name]


def test_mutations_of_a_function(faults_of, tmp_path):
    (tmp_path / "a.py").write_text(SOURCE)
    faults = faults_of("a.py", tmp_path)
    plain = ast.dump(ast.parse(SOURCE))
    changed = [ast.dump(ast.parse(fault.applied(SOURCE))) for fault in faults]
    assert plain not in changed
    assert len(set(changed)) == len(faults)
    kinds = {fault.kind for fault in faults}
    assert {"comparison", "and, or", "arithmetic", "negation removed", "condition negated"} <= kinds
    assert {"constant", "error removed", "call removed", "result removed"} <= kinds
    # neither messages nor kernels
    assert all(
        fault.before != "total - 0" and fault.line < SOURCE.split("@")[0].count("\n") for fault in faults
    )
