"""Do two models mean the same tokens by the same ids?"""

from __future__ import annotations

from typing import Any

from hasten.errors import VocabularyError
from hasten.targets.base import TargetInfo


def check_same_vocabulary(
    tokenizer: Any, other: Any, info: TargetInfo, other_info: TargetInfo
) -> None:
    """Raise VocabularyError, with both sizes and the first differing token, unless ids agree.

    Padding rows in either model's LM head, and extra tokens at the end of one vocabulary, are fine:
    the common ids decide. Without tokenizers (ids only) the sizes must be equal.
    """
    if tokenizer is None or other is None:
        if info.vocab_size != other_info.vocab_size:
            raise VocabularyError(
                f"{info.name} has {info.vocab_size} ids, {other_info.name} "
                f"{other_info.vocab_size}, and there is no tokenizer to compare them "
                "with: pass tokenizers, or choose a draft model of the same family"
            )
        return
    mine, theirs = _by_id(tokenizer), _by_id(other)
    for token_id in sorted(mine.keys() & theirs.keys()):
        if mine[token_id] != theirs[token_id]:
            raise VocabularyError(
                f"{info.name} ({len(mine)} tokens) and {other_info.name} ({len(theirs)} tokens) "
                f"have different vocabularies: id {token_id} is {mine[token_id]!r} in one and "
                f"{theirs[token_id]!r} in the other. "
                "Choose a draft model with the target's tokenizer"
            )


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}
