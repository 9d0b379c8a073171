"""Configuration shared by all tests: seeds, one thread, warnings as errors, tests skipped without a GPU."""

import contextlib
import gc
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from zlib import crc32

# before the libraries below are imported, which read it; of subprocesses, too: tensors of tests are too small for two
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

# programs of eval, which some tests load, find their neighbour `checkout`
sys.path.append(str(Path(__file__).parents[1] / "eval"))

import pytest

# torch is imported where it is needed: the controller of xdist collects and runs nothing

# imports of a million objects: the collector would go through all of them twenty times and free next to nothing
gc.disable()

IGNORED_WARNINGS = (  # every warning is an error, except
    # torch looks for a GPU driver while compiling and says so when there is none
    "ignore:CUDA initialization:UserWarning",
    # torch's own modules still use names that torch or Python has deprecated
    "ignore::DeprecationWarning:torch.*",
    "ignore::FutureWarning:torch.*",
    "ignore::DeprecationWarning:onnxscript.*",
    # a new release of a host is to be tested, not to fail because it is new
    "ignore:.* is newer than .*, the newest version that this vispe was tested with:UserWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    # workers of xdist inherit it, so that all collect the same tests around midnight
    os.environ.setdefault("VISPE_SAMPLE_DAY", str(date.today().toordinal()))
    config.addinivalue_line("filterwarnings", "error")
    for line in IGNORED_WARNINGS:
        config.addinivalue_line("filterwarnings", line)
    # xdist would take files with few tests last, however long those are
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection(session: pytest.Session) -> None:
    config = session.config
    if getattr(config.option, "numprocesses", None):  # of xdist; None in its workers, which collect
        return
    if {Path(word).resolve() for word in config.args} == {Path(__file__).parent.resolve()}:
        # skops searches all modules for the home of 800 functions: 4 s after the test files, 1 s before them
        import skops.io  # noqa: F401

        if os.environ.get("PYTEST_XDIST_WORKER") == "gw1":
            _import_from_the_end()


def _import_from_the_end() -> None:
    """Import the test files in reverse order, so that two workers without cached bytecode compile half of them each."""
    here = Path(__file__).parent
    for path in sorted(here.rglob("test_*.py"), reverse=True):
        name = ".".join(path.relative_to(here.parent).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):  # pytest reports them when it collects
            importlib.import_module(name)


def _sampled(items: list[pytest.Item], count: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the selected and the deselected items; a long test keeps at most `count` sets of parameters."""
    functions: dict[str, list[pytest.Item]] = {}
    chosen, day = set(), int(os.environ["VISPE_SAMPLE_DAY"])
    for item in items:
        # check_*: in an interpreter, where every test is long
        if item.get_closest_marker("slow") or item.path.name.startswith("check_"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
        else:
            chosen.add(id(item))
    for name, sets in functions.items():
        if sets[0].get_closest_marker("compiles"):  # one of them, another one every day
            chosen.add(id(sets[(crc32(name.encode()) + day) % len(sets)]))
            continue
        # evenly over the parameters, the first included; a single one anywhere
        step = max(len(sets) / count, 1)
        start = crc32(name.encode()) % len(sets) if count == 1 else 0
        chosen |= {id(sets[start + int(k * step)]) for k in range(min(count, len(sets)))}
    return [i for i in items if id(i) in chosen], [i for i in items if id(i) not in chosen]


def _has_case(item: pytest.Item) -> bool:
    """Return whether a test has parameters or cases with the value VISPE_CASE, such as a model type or an encoding."""
    from tests.cases import is_requested

    axes = getattr(getattr(item, "function", None), "_axes", ())
    names = [name for rows in axes for name, _ in rows]
    return any(map(is_requested, [*names, item.callspec.id] if hasattr(item, "callspec") else names))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("VISPE_CASE"):
        config.hook.pytest_deselected(items=[i for i in items if not _has_case(i)])
        items[:] = [i for i in items if _has_case(i)]
    if count := int(os.environ.get("VISPE_SAMPLE", "0")):
        items[:], left = _sampled(items, count)
        config.hook.pytest_deselected(items=left)
    long = {item.path for item in items if item.get_closest_marker("slow")}
    # files with long tests first, so that no worker ends alone
    items.sort(key=lambda item: item.path not in long)
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none on this machine"))


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and items stay until the end; each collection of a test skips them
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if count := os.environ.get("VISPE_SAMPLE"):
        day = os.environ["VISPE_SAMPLE_DAY"]
        terminalreporter.write_line(
            f"Sample of the long tests: VISPE_SAMPLE={count} VISPE_SAMPLE_DAY={day}. Set both for the same tests."
        )


@pytest.fixture(scope="module")
def without_collector() -> Iterator[None]:
    """Disable garbage collection for tests that parse all modules: it would traverse the syntax trees repeatedly."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_thread_each() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_flush() -> Iterator[None]:
    """Skip the flush to disk: files of tests need not survive a power failure. Closed files are still refused."""

    def fsync(file) -> None:
        os.fstat(file if isinstance(file, int) else file.fileno())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.fixture(scope="session", autouse=True)
def _temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Create temporary folders of documentation examples (300 MB per run) where pytest removes them."""
    folder, make = tmp_path_factory.mktemp("temporary"), tempfile.mkdtemp

    def mkdtemp(suffix=None, prefix=None, dir=None) -> str:
        return make(suffix, prefix, folder if dir is None else dir)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "mkdtemp", mkdtemp)
        yield


@pytest.fixture(autouse=True)
def _seeds() -> None:
    from tests.cases import seed_everything

    seed_everything()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill uninitialised memory with NaN, so that tests detect reads of it."""
    import torch

    def poison(make):
        def made(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() and not out.is_meta else out

        return made

    with torch.device("cpu"):  # torch caches its list of constructors on the first use
        torch.zeros(0)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
    return
