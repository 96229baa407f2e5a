"""What excuses an answer that differs from plain decoding's, and where nothing does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hasten.bench.explain import _judge, float32_reference


def llm(dtype: torch.dtype, kernels: str) -> Any:
    info = SimpleNamespace(dtype=dtype, kernels=kernels, device="cpu")
    source = SimpleNamespace(kind="object", location="")
    return SimpleNamespace(
        target=SimpleNamespace(info=info), _loaded=SimpleNamespace(source=source)
    )


@pytest.mark.parametrize(
    ("dtype", "kernels", "kind"),
    [
        (torch.float32, "torch", "fault"),
        (torch.bfloat16, "native", "fault"),
        (torch.bfloat16, "torch", "near tie"),
    ],
)
def test_a_near_tie_excuses_only_where_rounding_depends_on_the_pass(
    dtype: torch.dtype, kernels: str, kind: str
) -> None:
    tie: Any = SimpleNamespace(near_tie=True, describe=lambda: "a near tie")
    judged: Any = object()
    assert _judge(llm(dtype, kernels), True, tie, judged)[0] == kind
    assert _judge(llm(dtype, kernels), False, tie, judged)[0] == "unexplained"


def test_no_other_weights_are_loaded_where_nothing_is_excused() -> None:
    model = llm(torch.bfloat16, "native")
    assert float32_reference(model) is model.target
    assert float32_reference(llm(torch.bfloat16, "torch")) is None
