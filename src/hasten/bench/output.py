"""The result of a benchmark run, and its JSON form.

``{"environment": {...}, "rows": [...], "prompts": [...]}``: one row per (method, category) and per
(method, ``"overall"``), and one entry per (method, prompt). The meaning and unit of every field is
in the docstrings of `Row` and `Report`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hasten.errors import OptionError

OVERALL = "overall"


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one method on one category (or ``"overall"``).

    All times are wall clock and *decode only*: from the first token on. With repeats each prompt
    counts with its median time, and its counts are those of the run nearest to the median.

    prompts               answers (with ``turns="all"`` every turn is one)
    tokens                new tokens, the first ones included
    target_passes         passes after the prefill; None when a peer doesn't tell
    mean_accepted_length  tokens per target pass; plain decoding is 1.00; None as above
    tokens_per_s          tokens after the first / seconds after the first; 0 when there were none
    speedup_macro         mean over prompts of the ratio of tokens_per_s to plain decoding's
    speedup_micro         ratio of total tokens / total time to plain decoding's; None (both) when
                          no prompt had a second token
    identical             prompts whose ids equal plain decoding's, in every repeat
    draft_ms_per_round    drafting, milliseconds per round; None for peers
    verify_ms_per_round   the rest of the round (target pass, verification, commit); None for peers
    extra                 further figures:

    - ``decode_tokens``, ``decode_s``: what tokens_per_s is made of
    - ``speedup_micro_interval``: 95% bootstrap interval ``[low, high]``, rows of the suite
      resampled; None when there is only one
    - ``e2e_speedup_micro``: as speedup_micro with the prefill's time and tokens in
    - ``ttft_ms``: mean time to the first token
    - ``pass_ms``, ``topk_ms``, ``host_ms``: a round's time in the target's pass, in top-k
      selection and argmax, and outside of any model; ``topk_share`` and ``host_share`` relate the
      latter two to ``pass_ms``
    - ``distinct_4gram_share``: distinct / all 4-grams within each answer (low: the answers loop,
      which flatters lookup); None when all answers are shorter
    - ``accepted_length_histogram``: rounds by tokens emitted
    - ``acceptance_by_depth``, ``acceptance_by_source``: ``drafted``, ``accepted`` and ``rate``
    - ``drafted_per_round``: draft tokens verified per pass
    - ``layer_rows_per_round``: rows x layers of the target run per round, drafting included
    - ``near_ties``, ``faults``, ``unexplained``: the prompts that aren't identical, by kind; a
      fault is a lossless method's difference without excuse
    - ``differences`` (overall only): one line for each of them
    - ``choices``, ``choices_of_one``, ``decisions`` (overall only, of methods that draft from
      exits): see `hasten.bench.drafted.drafted_from`
    """

    method: str
    category: str
    prompts: int
    tokens: int
    target_passes: int | None
    mean_accepted_length: float | None
    tokens_per_s: float
    speedup_macro: float | None
    speedup_micro: float | None
    identical: int
    draft_ms_per_round: float | None
    verify_ms_per_round: float | None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        out["extra"] = dict(self.extra)
        return out


@dataclass(frozen=True, slots=True)
class Report:
    """A run's figures and the conditions they were measured under.

    warnings  for people: a busy machine, rows left out, an interrupted run
    partial   the run was interrupted; the rows cover what was measured until then
    prompts   for each method and prompt ``method``, ``category``, ``row`` (the suite's id),
              ``turn``, ``decode_tokens``, ``decode_s`` (median over repeats), ``target_passes``,
              ``identical``: for whoever wants to split or resample
    """

    environment: Mapping[str, Any]
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()
    partial: bool = False
    prompts: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values (no NaN, no infinity)."""
        environment = {**self.environment, "warnings": list(self.warnings), "partial": self.partial}
        return {
            "environment": environment,
            "rows": [row.to_json() for row in self.rows],
            "prompts": [dict(each) for each in self.prompts],
        }

    def write(self, path: str | Path) -> None:
        """Write `to_json` to a file. Raises OptionError when that can't be done."""
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
        try:
            Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionError("json", f"can't write {path}: {error.strerror or error}") from error

    def row(self, method: str, category: str = OVERALL) -> Row:
        """The row of a method and category. Raises KeyError."""
        for row in self.rows:
            if row.method == method and row.category == category:
                return row
        raise KeyError((method, category))

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods and peers in the order asked for, ``ar`` first."""
        return tuple(dict.fromkeys(row.method for row in self.rows))

    @property
    def categories(self) -> tuple[str, ...]:
        """Groups of the suite, in its order, without ``"overall"``."""
        return tuple(c for c in dict.fromkeys(row.category for row in self.rows) if c != OVERALL)

    @property
    def faults(self) -> int:
        """Answers of lossless methods that differ from plain decoding's without excuse."""
        return sum(row.extra.get("faults", 0) for row in self.rows if row.category == OVERALL)
