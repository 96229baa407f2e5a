"""What an exit module is: its kind, the layer it stands at, its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hasten.errors import ModelError

KINDS = ("lens", "affine", "adapter", "deep")


@dataclass(frozen=True, slots=True)
class ExitConfig:
    """One exit module.

    kind    ``lens``     the model's own norm and head on the state (LayerSkip, logit lens): nothing
                         is trained
            ``affine``   a low-rank map before a norm of its own (tuned lens)
            ``adapter``  one attention layer with a skip map and a small MLP (after Kangaroo)
            ``deep``     the same, which also sees states of higher layers: the target's own at
                         verified positions, its own output at drafted ones (after EAGLE-3)
    layer   layers of the target that a row has run; 0 (``deep`` only): none, the row is its token's
            embedding
    deep    the layers whose outputs at verified positions a ``deep`` module sees
    rank    of an affine map; inner: width of the MLP, 0 for none
    """

    kind: str
    layer: int
    hidden: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    inner: int = 0
    rank: int = 0
    deep: tuple[int, ...] = ()
    rope_theta: float = 10_000.0
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ModelError(f"unknown kind of exit module {self.kind!r}: one of {KINDS}")
        if self.layer < 0 or (self.layer == 0 and self.kind != "deep"):
            raise ModelError(f"an exit module of kind {self.kind!r} can't stand at {self.layer}")
        if (self.kind == "deep") != bool(self.deep):
            raise ModelError("deep layers are for modules of kind 'deep', which need some")

    @property
    def attends(self) -> bool:
        """Whether it has keys and values of its own."""
        return self.kind in ("adapter", "deep")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and sizes of its tensors."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.kind == "lens":
            return {}
        if self.kind == "affine":
            return {"down": (self.rank, h), "up": (h, self.rank), "bias": (h,), "norm": (h,)}
        deep = self.kind == "deep"
        out: dict[str, tuple[int, ...]] = {
            "input_norm": (h,),
            "skip": (h, h),
            "qkv": (q + 2 * kv, 2 * h if deep else h),
            "out": (h, q),
            "norm": (h,),
        }
        if deep:
            out |= {"fuse": (h, h * len(self.deep)), "deep_norm": (h,)}
        if self.inner:
            out |= {"mlp_norm": (h,), "gate_up": (2 * self.inner, h), "down": (h, self.inner)}
        return out

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "deep": list(self.deep)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ExitConfig:
        """Read back; ModelError when it isn't one."""
        try:
            return cls(**{**data, "deep": tuple(data["deep"])})
        except (KeyError, TypeError) as error:
            raise ModelError(f"not the description of an exit module: {error}") from None
