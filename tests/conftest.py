"""What every test may use. Nothing heavy is imported until a test asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hasten.targets.load import Loaded


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The folder of the embedded model: fetched and converted by the first test that asks."""
    from hasten.targets.catalog import prepare, resolve

    return prepare(resolve("smollm2-135m"))


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> Loaded:
    """The embedded model, loaded once in float32. Close the sequences you open."""
    from hasten.targets.load import load_target

    return load_target("smollm2-135m", device="cpu")
