"""What every test can rely on: seeds, one thread, warnings that are errors, a clean skip without a GPU."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# before the libraries below are imported, which read it; of subprocesses, too: tensors of tests are too small for two
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

# programs of eval, which some tests load, find their neighbour `checkout`
sys.path.append(str(Path(__file__).parents[1] / "eval"))

import pytest
import torch

from tests.cases import seed_everything

IGNORED_WARNINGS = (  # every warning is an error, except
    # torch looks for a GPU driver while compiling and says so when there is none
    "ignore:CUDA initialization:UserWarning",
    # torch's own modules still use names that torch or Python has deprecated
    "ignore::DeprecationWarning:torch.*",
    "ignore::FutureWarning:torch.*",
    "ignore::DeprecationWarning:onnxscript.*",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    for line in IGNORED_WARNINGS:
        config.addinivalue_line("filterwarnings", line)
    if hasattr(
        config.option, "loadscopereorder"
    ):  # xdist would take files with few tests last, however long those are
        config.option.loadscopereorder = False


def _sampled(items: list[pytest.Item], count: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the items, and those left over where a long test has more than `count` sets of parameters."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {id(item) for item in items if not item.get_closest_marker("slow")}
    for sets in functions.values():
        step = max(len(sets) / count, 1)  # evenly over the parameters, the first included
        chosen |= {id(sets[int(k * step)]) for k in range(min(count, len(sets)))}
    return [i for i in items if id(i) in chosen], [i for i in items if id(i) not in chosen]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if count := int(os.environ.get("VISPE_SAMPLE", "0")):
        items[:], left = _sampled(items, count)
        config.hook.pytest_deselected(items=left)
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(
        key=lambda item: item.path not in long
    )  # files with long tests first, so that no worker ends alone
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none on this machine"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread_each() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    seed_everything()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that nobody has written holds NaN, so that reading it shows."""

    def poison(make):
        def made(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() and not out.is_meta else out

        return made

    with torch.device("cpu"):  # torch remembers what its constructors are when it is first asked
        torch.zeros(0)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
    return
