"""Exit modules at work: a few rows at a time, with keys and values of their own.

The arithmetic is that of `hasten.train.exit_nets`, in as few operations as possible: norm weights
are folded into the products that follow, rotation is one complex product, and rows that only later
rows look at stop at their keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from hasten.errors import ModelError
from hasten.exits.config import ExitConfig

Product = Callable[[torch.Tensor], torch.Tensor]
"""A product with a fixed weight, ``(rows, in) -> (rows, out)``."""
MakeProduct = Callable[[torch.Tensor], Product]
"""Lays a weight ``(out, in)`` out for the device at hand."""

MOST_WAITING = 64
"""Verified rows wait for a question; so many are put into the module without one."""
_STEP = 128
"""Caches grow by so many rows at least."""


class ExitState:
    """One request's keys and values in one module: `length` verified rows, then scratch rows."""

    __slots__ = ("cache", "length", "scratch")

    def __init__(self) -> None:
        self.cache: torch.Tensor | None = None
        self.length = 0
        self.scratch = 0


class ExitModule:
    """An exit module of a loaded target; requests share it and keep an `ExitState` each.

    tensors  by the names of `ExitConfig.shapes`; ModelError when they don't fit
    make     lays products out (`hasten.targets.fused_weights.make_linear` on the fused target)
    """

    def __init__(
        self,
        config: ExitConfig,
        tensors: Mapping[str, torch.Tensor],
        make: MakeProduct,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config, self._dtype, self._device = config, dtype, device
        checked = _checked(config, tensors)
        self._size = (config.hidden,)
        self.norm = checked["norm"].to(device, dtype) if "norm" in checked else None
        if config.kind == "affine":
            self._down = make(checked["down"].to(device, dtype))
            self._up = make(checked["up"].to(device, dtype))
            self._bias = checked["bias"].to(device, dtype)
        if config.attends:
            self._load_block(checked, lambda weight: make(weight.to(device, dtype)))

    def _load_block(self, tensors: Mapping[str, torch.Tensor], make: MakeProduct) -> None:
        config = self.config
        turned = config.heads + config.kv_heads
        qkv = tensors["qkv"].clone()
        rows = turned * config.head_dim
        qkv[:rows] = _interleave(qkv[:rows], turned)
        qkv[: config.heads * config.head_dim] *= config.head_dim**-0.5
        scale = tensors["input_norm"]
        self._fuse: Product | None = None
        self._skip: Product | None = None
        if config.deep:
            # One product gives q, k, v and what the row adds to its predecessor's feature.
            skip = F.pad(tensors["skip"] * scale, (0, config.hidden))
            scale = torch.cat([scale, tensors["deep_norm"]])
            self._qkv = make(torch.cat([qkv * scale, skip]))
            self._fuse = make(tensors["fuse"])
        else:
            self._qkv, self._skip = make(qkv * scale), make(tensors["skip"])
        self._out = make(tensors["out"])
        self._gate_up: Product | None = None
        if config.inner:
            self._gate_up = make(tensors["gate_up"] * tensors["mlp_norm"])
            self._mlp_down = make(tensors["down"])
        half = config.head_dim // 2
        steps = torch.arange(half, dtype=torch.float32, device=self._device) / half
        self.frequencies = config.rope_theta**-steps
        self._turns = torch.zeros(0, half, dtype=torch.complex64, device=self._device)

    def products(self) -> tuple[Product, ...]:
        """Kind ``deep``: products with the deep states, with row and feature side by side (q, k, v
        and what a row adds to its feature), with what was gathered, and the MLP's two."""
        assert self._fuse is not None
        block = (self._fuse, self._qkv, self._out)
        return block if self._gate_up is None else (*block, self._gate_up, self._mlp_down)

    def fused(self, deep: Sequence[torch.Tensor]) -> torch.Tensor:
        """Kind ``deep``: the feature of rows from their states at the deep layers, each
        ``(rows, hidden)``; ``(rows, hidden)``."""
        assert self._fuse is not None
        eps = self.config.eps
        return self._fuse(torch.cat([F.rms_norm(x, self._size, None, eps) for x in deep], 1))

    def run(
        self,
        state: ExitState | None,
        rows: torch.Tensor,
        features: torch.Tensor | None,
        *,
        verified: int,
        want: int,
        depths: Sequence[int] = (),
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The module's outputs for the last `want` rows, ``(want, hidden)``, before its last norm.

        rows      states at the exit ``(n, hidden)``; features: of their predecessors (``deep``)
        verified  how many of them, the first ones, are verified and stay in the state; the others
                  are scratch rows, which follow those given since the state was last cut
        depths    of the scratch rows among this call's: 0 follows the last verified row
        mask      float32 ``(want, scratch rows in all)``, 0 or -inf: which scratch rows the wanted
                  rows see; None: all of them (a chain). With a mask, wanted rows must be scratch.
        """
        config = self.config
        if config.kind == "lens":
            return rows[-want:]
        if config.kind == "affine":
            last = rows[-want:]
            return last + self._up(self._down(last)) + self._bias
        assert state is not None
        mixed, width = self._mixed(rows, features)
        if features is not None:
            residual = features[-want:] + mixed[-want:, width:]
        else:
            assert self._skip is not None
            residual = self._skip(rows[-want:])
        parts = self._write(state, mixed[:, :width], verified, depths)
        hidden = residual + self._attend(state, parts[-want:], mask)
        if self._gate_up is not None:
            x = F.rms_norm(hidden, self._size, None, config.eps)
            gate, up = self._gate_up(x).chunk(2, 1)
            hidden = hidden + self._mlp_down(F.silu(gate).mul_(up))
        return hidden

    def store(self, state: ExitState, rows: torch.Tensor, features: torch.Tensor | None) -> None:
        """Keep keys and values of verified rows that nobody asks about: a small part of `run`."""
        mixed, width = self._mixed(rows, features)
        self._write(state, mixed[:, :width], len(rows), ())

    def _mixed(self, rows: torch.Tensor, features: torch.Tensor | None) -> tuple[torch.Tensor, int]:
        """The first product of the rows, of which so many columns are q, k and v."""
        config = self.config
        x = F.rms_norm(rows, self._size, None, config.eps)
        if features is not None:
            x = torch.cat([x, F.rms_norm(features, self._size, None, config.eps)], 1)
        return self._qkv(x), (config.heads + 2 * config.kv_heads) * config.head_dim

    def _write(
        self, state: ExitState, qkv: torch.Tensor, verified: int, depths: Sequence[int]
    ) -> torch.Tensor:
        """Store the rows' keys and values; q, k and v ``(rows, heads, head_dim)``, float32,
        rotated."""
        config, count = self.config, len(qkv)
        heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
        base = state.length + verified
        positions = [*range(state.length, base), *(base + depth for depth in depths)]
        assert len(positions) == count, "a depth for each scratch row"
        assert not (verified and state.scratch), "cut the state before verified rows come"
        parts = qkv.float().contiguous().view(count, heads + 2 * kv_heads, dim)
        rotated = parts[:, : heads + kv_heads].view(count, heads + kv_heads, dim // 2, 2)
        torch.view_as_complex(rotated).mul_(self._turn(positions).unsqueeze(1))
        start = state.length + state.scratch
        cache = self._room(state, start + count)
        cache[:, start : start + count] = parts[:, heads:].transpose(0, 1)
        state.length += verified
        state.scratch += count - verified
        return parts

    def _attend(
        self, state: ExitState, parts: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """What the rows of `parts`, the last ones stored, gather from all, projected."""
        config, want, cache = self.config, len(parts), state.cache
        assert cache is not None
        heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
        seen = state.length + state.scratch
        q = parts[:, :heads].reshape(want, kv_heads, heads // kv_heads, dim).transpose(0, 1)
        scores = torch.bmm(q.reshape(kv_heads, -1, dim), cache[:kv_heads, :seen].mT)
        self._hide(scores.view(kv_heads, want, heads // kv_heads, seen), want, mask)
        gathered = torch.bmm(torch.softmax(scores, -1), cache[kv_heads:, :seen])
        gathered = gathered.view(kv_heads, want, -1).transpose(0, 1).reshape(want, heads * dim)
        return self._out(gathered.to(self._dtype))

    def _hide(self, scores: torch.Tensor, want: int, mask: torch.Tensor | None) -> None:
        """Scores ``(kv_heads, want, group, seen)`` of what a row may not see become -inf."""
        if mask is not None:
            scores[..., -mask.shape[1] :] += mask.unsqueeze(1)
        elif want > 1:
            later = torch.full((want, want), -torch.inf, device=scores.device).triu_(1)
            scores[..., -want:] += later.unsqueeze(1)

    def _turn(self, positions: Sequence[int]) -> torch.Tensor:
        need = max(positions) + 1
        if need > len(self._turns):
            reach = torch.arange(-(-need // 1024) * 1024, device=self._device)
            angles = reach.unsqueeze(1) * self.frequencies
            self._turns = torch.polar(torch.ones_like(angles), angles)
        first, count = positions[0], len(positions)
        if positions[-1] - first + 1 == count and list(positions) == list(
            range(first, first + count)
        ):
            return self._turns[first : first + count]
        return self._turns[torch.tensor(positions, device=self._device)]

    def _room(self, state: ExitState, rows: int) -> torch.Tensor:
        cache = state.cache
        if cache is None or cache.shape[1] < rows:
            capacity = max(rows + _STEP, 2 * (0 if cache is None else cache.shape[1]))
            size = (2 * self.config.kv_heads, capacity, self.config.head_dim)
            grown = torch.zeros(size, dtype=torch.float32, device=self._device)
            if cache is not None:
                grown[:, : cache.shape[1]] = cache
            state.cache = cache = grown
        return cache


def cut(state: ExitState) -> None:
    """Forget the scratch rows."""
    state.scratch = 0


def _checked(config: ExitConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in float32; ModelError when one is missing or of another size."""
    out: dict[str, torch.Tensor] = {}
    for name, shape in config.shapes().items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            found = tuple(tensors[name].shape) if name in tensors else "missing"
            raise ModelError(
                f"exit module at layer {config.layer}: tensor {name!r} is {found}, its "
                f"description says {shape}: the file is damaged or of another model"
            )
        out[name] = tensors[name].detach().float()
    return out


def _interleave(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Makes features i and i + head_dim / 2 of each head neighbours (dim 0)."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)
