"""Makes the start rows that are shipped with an embedded model (see `hasten.start_rows`).

    python scripts/build_start_rows.py [MODEL]

Writes ``src/hasten/assets/MODEL/successors.npz``. Deterministic: float32, one fixed context token.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hasten
from hasten import start_rows

ASSETS = Path(__file__).parents[1] / "src" / "hasten" / "assets"


def main(model: str = "smollm2-135m") -> None:
    """Build and write the rows of `model`."""
    llm = hasten.load(model, method="ar", dtype="float32")
    info = llm.target.info
    context = start_rows.context_token(llm.tokenizer, info.eos_ids)
    rows = start_rows.build(
        llm.target,
        context,
        progress=lambda done, total: print(f"\r{done}/{total}", end="", flush=True),
    )
    path = ASSETS / model / "successors.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    start_rows.write(path, info.fingerprint, rows)
    print(f"\n{path.name}: {path.stat().st_size} bytes, {rows.shape}, after id {context}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
