"""A tiny LayerSkip-like model and exit modules for it; nothing is written to by the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.exits.layerskip import CALIBRATION, save_checkpoint, save_modules

import hasten
from hasten.api import LLM


@pytest.fixture(scope="session")
def layerskip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layerskip")
    save_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def layerskip(layerskip_folder: Path) -> LLM:
    return hasten.load(str(layerskip_folder), method="ar", dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def exits_folder(layerskip: LLM, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Modules of three kinds at 0, 2 and 4, with a calibration."""
    kinds = (("deep", 0), ("adapter", 2), ("affine", 4))
    folder, mark = tmp_path_factory.mktemp("exits"), layerskip.target.info.fingerprint
    return save_modules(folder, mark, kinds, calibration=CALIBRATION)
