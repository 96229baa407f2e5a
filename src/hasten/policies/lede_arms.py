"""What a round drafts from, chosen by what each choice is worth: `lede`'s arms.

An *arm* is a way to draft: not at all, copies of the request's own text, a small tree or a chain
from exit 0 in so many steps, both together, or a chain from a higher exit by the two-action agent.
A small network says from what is known at a round's start what each arm would do: tokens kept, rows
verified, questions to the module. Their worth is

    tokens - rho (time of verifying the rows + time of the questions)

with times from this machine's cost table and rho the price of a plain step's time in tokens. What
the network was fitted on are counts, so it serves other machines too. This is ours: LEDE chooses
an exit and a length (docs/methods/lede.md).
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hasten.drafters.exit_tree import Growth
from hasten.errors import ModelError

Floats = npt.NDArray[np.float32]

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to draft.

    copies   what followed the text's end elsewhere in it, and stored candidates
    growth   how the module at exit 0 is asked; None: it isn't
    walk     by the two-action agent, from the exits above 0
    """

    name: str
    copies: bool = False
    growth: Growth | None = None
    walk: bool = False

    @property
    def chain(self) -> bool:
        """Of the module's ids only the likeliest is taken."""
        return self.growth is not None and self.growth.width == 1

    @property
    def family(self) -> int:
        """Arms that are right or wrong together: 0 copies, 1 the module, 2 both, 3 the walk."""
        if self.walk:
            return 3
        return 0 if self.growth is None else 1 + self.copies


TREES = {
    **{n: Growth(steps=n) for n in (1, 2, 3)},
    **{n: Growth(steps=n, expand=2) for n in (5, 8)},
}
CHAINS = {n: Growth(width=1, expand=1, steps=n) for n in (1, 2, 4)}
PLAIN, COPY, WALK = Arm("plain"), Arm("copy", copies=True), Arm("walk", walk=True)
ARMS: tuple[Arm, ...] = (
    PLAIN,
    COPY,
    *(Arm(f"tree-{n}", growth=growth) for n, growth in TREES.items()),
    *(Arm(f"copy+tree-{n}", copies=True, growth=growth) for n, growth in TREES.items()),
    *(Arm(f"chain-{n}", growth=growth) for n, growth in CHAINS.items()),
    *(Arm(f"copy+chain-{n}", copies=True, growth=growth) for n, growth in CHAINS.items()),
    WALK,
)
BY_NAME: Mapping[str, Arm] = {arm.name: arm for arm in ARMS}
FAMILIES = 4


def offered(
    arms: Collection[str], *, breadth: bool, retrieval: bool, plain: bool, walk: bool
) -> tuple[Arm, ...]:
    """The arms of a file that these switches leave to choose from.

    breadth off: chains instead of trees; retrieval off: nothing is copied; plain off: a round
    always drafts (unless the budget policy finds none of it worth a row).
    """

    def left(arm: Arm) -> bool:
        if arm is PLAIN:
            return plain
        if arm.walk:
            return walk
        if arm is COPY:
            return retrieval
        return arm.copies == retrieval and arm.chain != breadth

    return tuple(arm for arm in ARMS if arm.name in arms and left(arm))


# -- what is known at a round's start --------------------------------------------------------------

FEATURES = (
    "match", "found", "first", "second", "score", "copies", "stored", "kept", "copy_hits",
    "module_hits", "module_kept", "last", "refused", "since", "said", "sure", "surely", "context",
    "answer",
)  # fmt: skip
RATE = 0.1
"""Weight of the newest round in running means."""


class RoundState:
    """What one request's rounds have shown; every number in about [0, 1].

    `features` reads it together with what the copies say. Nothing here depends on a token that is
    yet to be drawn.
    """

    __slots__ = (
        "_copied", "_copy_hits", "_kept", "_last", "_module_hits", "_module_kept", "_named",
        "_refused", "_said", "_since", "_sure", "_surely",
    )  # fmt: skip

    def __init__(self) -> None:
        self._kept, self._last, self._refused = 0.15, 0.0, 0.0
        self._copy_hits = self._module_hits = 0.4
        self._module_kept, self._said, self._since = 0.2, 0.5, 0
        self._sure = self._surely = 0.5
        self._copied: int | None = None
        """The likeliest copied token; None: nothing was copied."""
        self._named: int | None = None
        """The token the module named first; None: it wasn't asked."""

    def features(
        self,
        context: int,
        answer: int,
        tokens: Sequence[int],
        chances: Sequence[float],
        match: int,
        score: float,
        stored: float,
    ) -> Floats:
        """``(len(FEATURES),)`` float32.

        context   tokens so far; answer: those of the answer
        tokens    copied candidates of the next token, with their `chances`, likeliest first
        match     length of the longest suffix found; score: expected copied tokens kept
        stored    1: candidates are stored for the pending token, 0.5: only those all texts start
                  with, 0: none
        """
        self._copied = tokens[0] if tokens else None
        return np.array(
            (
                min(match, 32) ** 0.5 / 5.7,
                1.0 if tokens else 0.0,
                chances[0] if chances else 0.0,
                chances[1] if len(chances) > 1 else 0.0,
                min(score, 8.0) / 8.0,
                min(len(tokens), 8) / 8.0,
                stored,
                self._kept,
                self._copy_hits,
                self._module_hits,
                self._module_kept,
                self._last,
                self._refused,
                min(self._since, 8) / 8.0,
                self._said,
                self._sure,
                self._surely,
                np.log2(1.0 + context) / 16.0,
                min(answer, 256) / 256.0,
            ),
            dtype=np.float32,
        )

    def asked(self, named: int | None, chance: float) -> None:
        """The module was asked, and its likeliest next token had this chance."""
        self._named, self._said, self._since = named, chance, 0

    def learn(
        self, emitted: Sequence[int], drafted: int, module_kept: int, sure: float | None
    ) -> None:
        """A round is over: what it emitted, how many tokens were verified, how many of the module's
        were kept, and the target's own top-2 margin after the last token (logits / 10, None: not
        known)."""
        kept = len(emitted) - 1
        self._last = min(kept, 8) / 8.0
        self._kept += RATE * (self._last - self._kept)
        self._refused = 1.0 if drafted and not kept else 0.0
        if not emitted:
            return
        if self._copied is not None:
            self._copy_hits += RATE * ((self._copied == emitted[0]) - self._copy_hits)
        if self._named is not None:
            self._module_hits += RATE * ((self._named == emitted[0]) - self._module_hits)
            self._module_kept += RATE * (min(module_kept, 4) / 4.0 - self._module_kept)
        else:
            self._since += 1
        if sure is not None:
            self._sure = min(sure, 1.0)
            self._surely += RATE * (self._sure - self._surely)
        self._copied = self._named = None


# -- what arms are worth ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArmFile:
    """What arms do, as a fitted network: data, kept as ``.npz``.

    arms      names, in the order of the network's outputs
    mean, scale   of the features, ``(F,)``
    layers    weights ``(in, out)`` and biases ``(out,)``, tanh between them; the last has three
              outputs an arm: tokens kept, rows verified beside the root (of ``walk``: the round's
              whole time in plain steps), steps of the module
    rho       tokens per plain step's time while it was fitted
    facts     ``target`` and ``exits``: the weights and the modules it belongs to; more for people
    """

    arms: tuple[str, ...]
    mean: Floats
    scale: Floats
    layers: tuple[tuple[Floats, Floats], ...]
    rho: float
    facts: Mapping[str, Any]

    def predict(self, x: Floats) -> Floats:
        """``(..., arms, 3)`` from features ``(..., F)``."""
        out = (x - self.mean) / self.scale
        for weight, bias in self.layers[:-1]:
            out = np.tanh(out @ weight + bias)
        weight, bias = self.layers[-1]
        made: Floats = np.maximum(out @ weight + bias, 0.0)
        return made.reshape(*x.shape[:-1], len(self.arms), 3)

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        path = Path(path)
        scratch = path.with_name(f".{path.name}.tmp")
        meta = {
            "format": FORMAT,
            "kind": "lede-arms",
            "arms": self.arms,
            "features": FEATURES,
            "rho": self.rho,
            "facts": dict(self.facts),
        }
        arrays = {"mean": self.mean, "scale": self.scale}
        for number, (weight, bias) in enumerate(self.layers):
            arrays |= {f"weight{number}": weight, f"bias{number}": bias}
        with scratch.open("wb") as file:
            np.savez(file, meta=np.array(json.dumps(meta)), **arrays)  # type: ignore[arg-type]
        scratch.replace(path)


def read(file: str | Path, where: str) -> ArmFile:
    """A file's arms. Raises ModelError, naming `where`, when they can't be read or used."""
    again = "Make it again with `hasten train lede arms`"
    try:
        with Path(file).open("rb") as opened, np.load(opened, allow_pickle=False) as raw:
            meta = json.loads(str(raw["meta"]))
            arrays = {name: raw[name].astype(np.float32) for name in raw.files if name != "meta"}
        if meta["kind"] != "lede-arms" or meta["format"] != FORMAT:
            raise ValueError(f"it is {meta['kind']!r} of format {meta['format']}")
        if tuple(meta["features"]) != FEATURES:
            raise ValueError("it was fitted on other features than this version of hasten has")
        arms = tuple(map(str, meta["arms"]))
        if unknown := set(arms) - BY_NAME.keys():
            raise ValueError(f"it knows arms that this version doesn't: {sorted(unknown)}")
        count = sum(name.startswith("weight") for name in arrays)
        layers = tuple((arrays[f"weight{n}"], arrays[f"bias{n}"]) for n in range(count))
        made = ArmFile(
            arms, arrays["mean"], arrays["scale"], layers, float(meta["rho"]), dict(meta["facts"])
        )
        _check(made)
        return made
    except (OSError, ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile) as error:
        problem = f"{where} holds no arms of lede that can be used ({error})"
        raise ModelError(f"{problem}. {again}") from None


def _check(made: ArmFile) -> None:
    """Raise ValueError unless the sizes fit and all numbers are finite."""
    width = len(FEATURES)
    sizes = [made.mean.shape, made.scale.shape]
    if not made.layers or any(size != (width,) for size in sizes):
        raise ValueError("its sizes don't fit its features")
    for weight, bias in made.layers:
        if weight.ndim != 2 or weight.shape[0] != width or bias.shape != weight.shape[1:]:
            raise ValueError("its layers don't fit each other")
        width = weight.shape[1]
    if not made.arms or width != 3 * len(made.arms):
        raise ValueError("its outputs don't fit its arms")
    numbers = [made.mean, made.scale, *(each for layer in made.layers for each in layer)]
    if not all(np.isfinite(each).all() for each in numbers) or not np.isfinite(made.rho):
        raise ValueError("some of its numbers aren't finite")
    if not (made.scale > 0).all():
        raise ValueError("some of its scales aren't positive")


@dataclass(frozen=True, slots=True)
class ArmCosts:
    """Times in plain steps: ``verify[n]`` of a pass of n rows (index 0 unused), a first question
    to the module at exit 0, and each step more."""

    verify: tuple[float, ...]
    question: float
    step: float

    def of(self, rows: float, steps: float) -> float:
        """Of a round that verified so many rows, the root included, after so many steps."""
        asked = self.question + self.step * (steps - 1.0) if steps > 0.0 else 0.0
        return float(np.interp(rows, np.arange(len(self.verify)), self.verify)) + asked
