"""Makes the phrases that are shipped with an embedded model (see `hasten.phrases`).

    python scripts/build_phrases.py [--model MODEL] TEXT [TEXT ...]

TEXT is what `hasten train data` has made, or a file of such rows; answers of the split ``modules``
are counted. Writes ``src/hasten/assets/MODEL/phrases.npz``. Takes seconds; deterministic.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hasten import phrases
from hasten.targets.catalog import resolve
from hasten.train import rows

ASSETS = Path(__file__).parents[1] / "src" / "hasten" / "assets"


def main() -> None:
    """Count and write."""
    parser = argparse.ArgumentParser(description="Count the phrases shipped with a model.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("text", nargs="+", help="folders or files of training text")
    asked = parser.parse_args()
    texts = [row for path in asked.text for row in rows.read(path, split="modules")]
    made = phrases.build((row.prompt, row.output) for row in texts)
    path = ASSETS / asked.model / "phrases.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    phrases.write(path, resolve(asked.model).fingerprint, made)
    tokens = sum(len(row.output) for row in texts)
    print(f"{path.name}: {path.stat().st_size} bytes, {len(made)} contexts of {tokens} tokens")


if __name__ == "__main__":
    main()
