"""What a run is told is checked before it begins."""

from __future__ import annotations

from typing import Any

import pytest

from hasten.errors import OptionError
from hasten.train.dflash.options import SFT, Head, Options, Rounds, Shape


@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    [
        (Options, {"weight_decay": -0.1}, "weight_decay"),
        (Options, {"weight_decay": float("nan")}, "weight_decay"),
        (Options, {"grad_clip": 0.0}, "grad_clip"),
        (Options, {"seed": 2**64}, "seed"),
        (Options, {"share": float("nan")}, "share"),
        (Options, {"init": ""}, "init"),
        (Shape, {"rope_theta": 0.0}, "rope_theta"),
        (Shape, {"block": 1}, "block"),
        (SFT, {"lr": float("inf")}, "lr"),
        (SFT, {"warmup": 1.0}, "warmup"),
        (Rounds, {"clip": -0.01}, "clip"),
        (Rounds, {"max_new_tokens": 1}, "max_new_tokens"),
        (Head, {"lookahead": -1}, "lookahead"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(
    kind: Any, changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(OptionError, match=f"^{name}:"):
        kind(**changes)
