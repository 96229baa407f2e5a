"""Where drafts came from, of methods that draft from exits: figures for the report and the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hasten.choices import exits_drafted

if TYPE_CHECKING:
    from hasten.bench.stats import Answer


def drafted_from(answers: Sequence[Answer], row_ids: Sequence[str]) -> dict[str, Any]:
    """Figures of answers that drafted from exits; nothing for others.

    ``choices``         by what a round drafted from (``plain``, ``exit 4``, ``copy + exit 0``):
                        ``rounds``, tokens ``drafted`` and ``kept``
    ``choices_of_one``  one answer, that with the most kinds of rounds: its ``row``, and for each
                        round ``[name, exit or None, longest path, kept]``
    ``decisions``       of a learned policy: ``per_round``, ``us`` (microseconds each) and ``share``
                        of the decoding time; not there for others
    """
    if not exits_drafted([each for answer in answers for each in answer.choices]):
        return {}
    choices: dict[str, dict[str, int]] = {}
    for answer in answers:
        for each in answer.choices:
            entry = choices.setdefault(each.name, {"rounds": 0, "drafted": 0, "kept": 0})
            entry["rounds"] += 1
            entry["drafted"] += each.drafted
            entry["kept"] += len(each.kept)
    best = max(range(len(answers)), key=lambda at: len({c.name for c in answers[at].choices}))
    one = [[c.name, c.exit, c.depth, len(c.kept)] for c in answers[best].choices]
    ranked = dict(sorted(choices.items(), key=lambda item: -item[1]["rounds"]))
    return {
        "choices": ranked,
        "choices_of_one": {"row": row_ids[best], "rounds": one},
        **_decisions(answers),
    }


def _decisions(answers: Sequence[Answer]) -> dict[str, Any]:
    count = sum(answer.decided for answer in answers)
    if not count:
        return {}
    seconds = sum(answer.deciding_s for answer in answers)
    rounds = sum(len(answer.choices) for answer in answers)
    whole = sum(answer.decode_s for answer in answers)
    return {
        "decisions": {
            "per_round": count / rounds if rounds else 0.0,
            "us": 1e6 * seconds / count,
            "share": seconds / whole if whole > 0 else 0.0,
        }
    }
