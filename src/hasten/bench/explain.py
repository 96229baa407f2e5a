"""Why answers differ from plain decoding's: near ties, faults, and what was not looked into."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from hasten.api import LLM
from hasten.bench.stats import Difference, Item, Measured
from hasten.divergence import Divergence, explain_divergence
from hasten.prove import DrawDivergence, explain_draw
from hasten.targets.base import Target, TargetInfo
from hasten.targets.load import load_target
from hasten.types import SamplingParams

OnStep = Callable[[int, int], None]
"""Called with (done, total) while differences are re-scored."""


def float32_reference(llm: LLM) -> Target | None:
    """The LLM's model in float32: itself, or loaded anew; None for one given as a loaded object.

    Itself too where nothing is excused: other weights can't judge quantized ones.
    """
    source = llm._loaded.source
    if _nothing_is_excused(llm.target.info):
        return llm.target
    if source.kind == "object":
        return None
    device = llm.target.info.device
    return load_target(source.location, dtype=torch.float32, device=device).target


def _nothing_is_excused(info: TargetInfo) -> bool:
    """In float32, and on the native kernels, where a row's bits don't depend on its pass."""
    return info.dtype == torch.float32 or info.kernels == "native"


def find_differences(
    llm: LLM,
    items: Sequence[Item],
    measured: Measured,
    params: Sequence[SamplingParams],
    *,
    plain: str,
    exact: Collection[str],
    limit: int,
    on_step: OnStep,
) -> list[Difference]:
    """One entry for each (method, prompt) whose answer isn't plain decoding's in some repeat.

    params  each item's, with the seed it was drawn with
    exact   methods that must give plain decoding's ids; the others' differences are "unexplained"
    limit   at most this many are re-scored; in float32 all are faults whether re-scored or not

    In float32 and on the native kernels nothing is excused. In lower precision the two candidates
    must be a near tie (greedy), or rounding must be able to make the draw either of them (sampled),
    see `hasten.divergence` and `hasten.prove`.
    """
    found = [
        (method, at, other)
        for method, per_item in measured.items()
        for at, repeats in enumerate(per_item)
        if (other := _first_other(measured[plain][at][0].tokens, [r.tokens for r in repeats]))
        is not None
    ]
    due = [f for f in found if f[0] in exact][:limit]
    reference = float32_reference(llm) if due else None
    out: list[Difference] = []
    done = 0
    for method, at, other in found:
        item, answer = items[at], measured[plain][at][0].tokens
        place = f"{item.category} {item.row_id}" + (f" turn {item.turn}" if item.turn > 1 else "")
        scored: Divergence | DrawDivergence | None = None
        if (method, at, other) in due:
            on_step(done, len(due))
            scored = _score(llm.target, reference, item, answer, other, params[at])
            done += 1
        kind, why = _judge(llm, method in exact, scored, reference)
        out.append(Difference(method, at, kind, f"{place}: {why or _where(answer, other)}"))
    if due:
        on_step(done, len(due))
    return out


def _first_other(
    plain: tuple[int, ...], answers: Sequence[tuple[int, ...]]
) -> tuple[int, ...] | None:
    return next((answer for answer in answers if answer != plain), None)


def _score(
    target: Target,
    reference: Target | None,
    item: Item,
    plain: tuple[int, ...],
    other: tuple[int, ...],
    params: SamplingParams,
) -> Divergence | DrawDivergence | None:
    if params.is_greedy:
        return explain_divergence(target, item.ids, plain, other, reference=reference)
    seed = params.seed or 0
    return explain_draw(target, item.ids, plain, other, params, seed, reference=reference)


def _judge(
    llm: LLM,
    exact: bool,
    scored: Divergence | DrawDivergence | None,
    reference: Target | None,
) -> tuple[str, str]:
    """Kind of a difference, and what was measured about it ("": nothing)."""
    why = scored.describe() if scored is not None else ""
    if exact and _nothing_is_excused(llm.target.info):
        return "fault", why and f"{why} (here nothing is excused)"
    if not exact or scored is None or reference is None:
        return "unexplained", why if reference is not None else ""
    return ("near tie" if scored.near_tie else "fault"), why


def _where(plain: Sequence[int], other: Sequence[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if at is None:
        return f"one answer is longer: {len(plain)} tokens by plain decoding, {len(other)} here"
    return f"token {at}: plain {plain[at]}, other {other[at]}; not looked into"
