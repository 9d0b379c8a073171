"""Tests of models of Hugging Face: one thread for these tiny models, and filters for warnings of their code."""

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
