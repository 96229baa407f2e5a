"""What a transformers model can do: found by structure and by running it, never by its name.

`inspect_model` reads the facts off a model object. `self_check` compares a small tree pass, the
commit of a scattered path and one more step with plain one-row passes of the same model; what
comes out wrong is switched off with a sentence that says why.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hasten.errors import CapabilityError
from hasten.targets.base import Capabilities
from hasten.targets.hf_cache import LayerCache, is_plain, is_recurrent
from hasten.targets.hf_model import ModelFacts
from hasten.targets.masks import MaskKind, mask_kinds
from hasten.types import Pass, Rows

if TYPE_CHECKING:
    from hasten.targets.transformers import TransformersTarget

PROMPT_ROWS = 12
"""Rows of the self-check's prompt: a window of up to this many tokens slides during the check."""

TREE = (-1, 0, 0, 2)
"""Parents of the tried tree: a root, a wrong first child a, a second child b1 with a child b2."""

ALWAYS_OFF = (
    "layer ranges are off: the model's own forward runs all layers at once",
    "packing is off: the rows of several sequences run one sequence after the other",
)
PLAIN = Capabilities(tree=False, rollback=False)


def tolerance(facts: ModelFacts) -> float:
    """Largest difference of two right ways to compute logits, as a share of their scale.

    Between passes of several shapes a real 30-layer model shows 3e-6 in float32, 6e-3 in float16
    and 5e-2 in bfloat16; a mask or position ids that are ignored show 0.4 and more.
    """
    if facts.quantized or facts.dtype == torch.bfloat16:
        return 0.15
    if facts.dtype == torch.float16 or torch.get_float32_matmul_precision() != "highest":
        return 0.05
    return 2e-4


def self_check(target: TransformersTarget) -> Capabilities:
    """What the target may be trusted with; about a dozen passes over few rows.

    The target's `capabilities`, `multi_row` and `kinds` are set to what is about to be tried, and
    the last two, in the end, to what held. Raises CapabilityError when the model can't even be run
    plainly with a cache.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check = _Check(target, seed=0)
        found = check.run()
        if check.measured_wrong and target.facts.dtype != torch.float32:
            # A router's near tie may fall the other way in low precision; a wrong mask stays wrong.
            kept = target.multi_row, target.kinds
            again = _Check(target, seed=1).run()
            if (again.tree, again.rollback) > (found.tree, found.rollback):
                return again
            target.multi_row, target.kinds = kept
    return found


def structural_doubt(
    facts: ModelFacts, cache: LayerCache, kinds: dict[str, MaskKind] | None
) -> str:
    """Why a tree must not even be tried, or "" when nothing speaks against it."""
    if facts.attention not in ("sdpa", "eager"):
        return (
            f"its attention ({facts.attention}) takes no tree mask; load the model with "
            "attn_implementation='sdpa'"
        )
    if not facts.takes_positions:
        return "its forward takes no position_ids"
    if kinds is None or not all(is_plain(layer) for layer in cache.layers):
        return "its cache holds more than keys and values, or its layers need masks of their own"
    windowed = any(kind.window is not None for kind in kinds.values())
    if not windowed and isinstance(getattr(facts.config, "window_size", None), int):
        return "its attention has a window of its own, which counts cache slots"
    return ""


class _Check:
    """One run of the self-check, with tokens drawn from `seed`."""

    def __init__(self, target: TransformersTarget, seed: int) -> None:
        self.target = target
        self.limit = tolerance(target.facts)
        ids = _ordinary_ids(target.facts, PROMPT_ROWS + 5, seed)
        self.prompt = ids[:PROMPT_ROWS]
        self.root, self.a, self.b1, self.b2, self.last = ids[PROMPT_ROWS:]
        self.notes: list[str] = []
        self.measured_wrong = False

    def run(self) -> Capabilities:
        """Plain first, then the most that structure allows, then less."""
        target = self.target
        target.capabilities, target.multi_row, target.kinds = PLAIN, False, None
        taps = self._plain()
        doubt = self._holds(self._multi_row, "a pass over rows that continue a prompt")
        target.multi_row = not doubt
        found = replace(PLAIN, taps=taps)
        if self._croppable():
            found = self._beyond_plain(found, doubt)
        else:
            self.notes.append("only plain decoding: the model's state can't be rolled back")
        if doubt:
            self.notes.append(f"prompts run in one pass and are continued row by row: {doubt}")
        return replace(found, notes=(*self.notes, *ALWAYS_OFF))

    def _beyond_plain(self, found: Capabilities, chain_doubt: str) -> Capabilities:
        target = self.target
        cache: LayerCache = self.base.cache
        target.kinds = mask_kinds(target.facts.config, cache.layers)
        doubt = structural_doubt(target.facts, cache, target.kinds)
        if not doubt:
            target.capabilities = replace(found, tree=True, rollback=True)
            doubt = self._holds(self._tree, "a tree pass")
            if not doubt:
                return target.capabilities
        self.notes.append(f"trees are off: {doubt}")
        target.kinds = None
        target.capabilities = replace(found, rollback=True)
        chain_doubt = chain_doubt or self._holds(self._chain, "a chain pass")
        if not chain_doubt:
            return target.capabilities
        self.notes.append(f"only plain decoding: {chain_doubt}")
        return found

    def _croppable(self) -> bool:
        cache: LayerCache = self.base.cache
        stock = getattr(cache.raw, "is_croppable", True)  # transformers before 5.19 doesn't say
        return bool(stock) and not any(is_recurrent(layer) for layer in cache.layers)

    def _holds(self, trial: Callable[[], float], what: str) -> str:
        """ "" when the trial's difference is within the limit, else what went wrong."""
        try:
            error = trial()
        except Exception as problem:  # any model's own error: the answer is to do without
            reason = (str(problem).splitlines() or [""])[0]
            return f"{what} raised {type(problem).__name__}: {reason}"
        if error <= self.limit:
            return ""
        self.measured_wrong = True
        return (
            f"{what} differed from plain passes by {error:.2g} of the scale (limit {self.limit:g})"
        )

    def _plain(self) -> bool:
        """Fill the references; True when hidden states can be tapped."""
        target, facts = self.target, self.target.facts
        layers = (0, facts.num_layers) if facts.layers is not None else ()
        self.base = target.open()
        try:
            first = target.prefill(self.base, self.prompt, taps=layers)
        except Exception as problem:
            raise CapabilityError(
                f"{facts.architecture} can't run a pass with a transformers DynamicCache "
                f"({type(problem).__name__}: {problem}), and hasten has no other way to run it"
            ) from problem
        self.first = first
        trunk = target.open(self.base)
        self.right = [self._step(trunk, self.root)]
        self.right_a = self._step(target.open(trunk), self.a)
        self.right += [self._step(trunk, token) for token in (self.b1, self.b2, self.last)]
        self.right_cache: LayerCache = trunk.cache
        whole = target.prefill(
            target.open(), [*self.prompt, self.root, self.b1, self.b2, self.last]
        )
        error = _difference(whole.logits, self.right[-1])
        if error > 0.25:
            raise CapabilityError(
                f"{facts.architecture}: with its cache the logits differ by {error:.2g} of their "
                "scale from those without: this cache gives wrong text, also in transformers"
            )
        wanted = (len(self.prompt), facts.hidden_size)
        tapped = all(
            i in first.hidden and first.hidden[i].shape == wanted for i in (0, facts.num_layers)
        )
        if not tapped:
            self.notes.append(
                "taps are off: the decoder layers, or their hidden states, weren't found"
            )
        return tapped

    def _step(self, sequence: Any, token: int) -> torch.Tensor:
        (passed,) = self.target.forward([Rows(sequence, (token,), (-1,))])
        self.target.commit(sequence, (0,))
        assert passed.logits is not None
        return passed.logits[0]

    def _multi_row(self) -> float:
        """Rows run together on a filled cache, against the same rows run with the prompt.

        A recurrent state is compared itself: that it was ignored may hardly show in the logits.
        """
        target = self.target
        sequence = target.open()
        target.prefill(sequence, self.prompt[:-2])
        target.multi_row = True
        passed = target.prefill(sequence, self.prompt[-2:])
        logits = _difference(passed.logits, self.first.logits)
        return max(logits, _state_difference(sequence.cache, self.base.cache))

    def _tree(self) -> float:
        """A tree in one pass, the commit of its scattered branch, and a step from there."""
        sequence = self.target.open(self.base)
        tokens = (self.root, self.a, self.b1, self.b2)
        (passed,) = self.target.forward([Rows(sequence, tokens, TREE)])
        self.target.commit(sequence, (0, 2, 3))
        right = [self.right[0], self.right_a, self.right[1], self.right[2]]
        return self._worst(sequence, passed, right)

    def _chain(self) -> float:
        """A chain of which one row is kept, another one in its place, and a step from there."""
        sequence = self.target.open(self.base)
        (first,) = self.target.forward([Rows(sequence, (self.root, self.a), (-1, 0))])
        self.target.commit(sequence, (0,))
        (second,) = self.target.forward([Rows(sequence, (self.b1, self.b2), (-1, 0))])
        self.target.commit(sequence, (0, 1))
        error = _difference(_rows(first), torch.stack([self.right[0], self.right_a]))
        return max(error, self._worst(sequence, second, self.right[1:3]))

    def _worst(self, sequence: Any, passed: Pass, right: list[torch.Tensor]) -> float:
        """The pass's logits, one more step's and the cache that is left, against plain ones."""
        return max(
            _difference(_rows(passed), torch.stack(right)),
            _difference(self._step(sequence, self.last), self.right[3]),
            _state_difference(sequence.cache, self.right_cache),
        )


def _rows(passed: Pass) -> torch.Tensor:
    assert passed.logits is not None
    return passed.logits


def _difference(got: torch.Tensor | None, right: torch.Tensor | None) -> float:
    """Largest difference of rows of logits as a share of their scale; infinite for NaN."""
    assert got is not None
    assert right is not None
    got, right = got.float(), right.float()
    scale = (right - right.mean(-1, keepdim=True)).abs().max().clamp_min(1e-12)
    return _number((got - right).abs().max() / scale)


def _state_difference(got: LayerCache, right: LayerCache) -> float:
    """Largest difference of two caches' tensors, each as a share of the tensor's own scale."""
    pairs = list(zip(got.states(), right.states(), strict=True))
    if any(x.shape != y.shape for x, y in pairs):
        return float("inf")
    errors = [
        _number((x.float() - y.float()).abs().max() / y.float().abs().max().clamp_min(1e-12))
        for x, y in pairs
        if y.numel()
    ]
    return max(errors, default=0.0)


def _number(error: torch.Tensor) -> float:
    """The error as a float: infinite for NaN, which would pass every comparison."""
    return float(error.nan_to_num(nan=float("inf")))


def _ordinary_ids(facts: ModelFacts, count: int, seed: int) -> list[int]:
    """Random ids that mean nothing special to the model; the global generators aren't touched."""
    special: set[Any] = set()
    for config in (facts.config, facts.base.config):
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_ids", "_token_index")):
                special.update(value if isinstance(value, (list, tuple)) else [value])
    generator = random.Random(seed)
    usable = [i for i in range(min(facts.vocab_size, facts.embedding_rows)) if i not in special]
    if len(usable) >= count:
        return generator.sample(usable, count)
    return generator.choices(usable, k=count)
