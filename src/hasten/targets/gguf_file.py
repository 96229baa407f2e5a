"""Turns a GGUF file into a folder that transformers and hasten load quickly. Done once a file.

The reading itself (dequantising, names, config, tokenizer) is transformers'. It runs in a child
process: it prints bars of its own, warns, needs several times the file in memory, and must neither
disturb the user's process nor outlive Ctrl-C.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import hasten
from hasten._cache import progress
from hasten.errors import ModelError

_MAGIC = b"GGUF"
_FLOAT32_PARAMETERS = 2_000_000_000
"""Up to this many parameters the weights are stored in float32 (exact), above it in bfloat16."""


def is_gguf(path: Path) -> bool:
    """True when the file starts as a GGUF file does."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def convert(gguf: Path, into: Path, name: str) -> None:
    """Fill the empty folder `into` with the model's safetensors, config and tokenizer.

    Weights are float32 (bfloat16 over two billion parameters); a tied head is not stored twice.
    Raises ModelError when the file is damaged or transformers can't read its architecture.
    """
    package_root = str(Path(hasten.__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")])),
        "TQDM_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", __name__, str(gguf.absolute()), str(into.absolute())]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
        progress(f"converting {name} (once)"),
    ):
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            output.seek(0)
            lines = output.read().strip().splitlines() or [f"exit status {process.returncode}"]
            raise ModelError(
                f"{gguf} can't be converted: {lines[-1]}. Is the file complete, and is its "
                "architecture one that transformers reads from GGUF?"
            )


def _write(gguf: Path, into: Path) -> None:
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parameters = sum(int(t.n_elements) for t in GGUFReader(gguf).tensors)
    dtype = torch.float32 if parameters <= _FLOAT32_PARAMETERS else torch.bfloat16
    folder, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)

    config = copy.deepcopy(model.config)
    # The weights are plain numbers now; with this entry the folder would be read as quantised.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config._name_or_path = ""

    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(into)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(into)
    tokenizer.save_pretrained(into)


if __name__ == "__main__":
    _write(Path(sys.argv[1]), Path(sys.argv[2]))
