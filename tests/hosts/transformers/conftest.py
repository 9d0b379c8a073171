"""Tests on Hugging Face's models: one thread, as they are too small for two, and what their code warns of."""

from collections.abc import Iterator

import pytest
import torch

IGNORED_WARNINGS = ("ignore::DeprecationWarning:transformers.*", "ignore::FutureWarning:transformers.*")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "hosts/transformers/" in item.path.as_posix():
            for line in IGNORED_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(line))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
