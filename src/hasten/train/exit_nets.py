"""Exit modules as they are trained: whole texts at once, in float32 or under autocast.

`hasten.exits.modules` runs the same arithmetic row by row; a test holds the two together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from hasten.exits.config import ExitConfig


class ExitNet(nn.Module):
    """The tensors of an exit module and its arithmetic over padded batches ``(texts, rows, ...)``.

    Tensors carry the names and sizes of `ExitConfig.shapes`.
    """

    inv_freq: torch.Tensor
    bias: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor
    norm: torch.Tensor
    input_norm: torch.Tensor
    skip: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    fuse: torch.Tensor
    deep_norm: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor

    def __init__(self, config: ExitConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        for name, shape in config.shapes().items():
            self.register_parameter(name, nn.Parameter(_initial(name, shape, config, generator)))
        half = config.head_dim // 2
        steps = torch.arange(half, dtype=torch.float32) / max(half, 1)
        self.register_buffer("inv_freq", config.rope_theta**-steps, persistent=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The trained tensors, detached, by name."""
        return {name: value.detach() for name, value in self.named_parameters()}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors by name; those it hasn't are left out, those missing keep their values."""
        with torch.no_grad():
            for name, value in self.named_parameters():
                if name in tensors and tensors[name].shape == value.shape:
                    value.copy_(tensors[name])

    def affine(self, state: torch.Tensor) -> torch.Tensor:
        """Kind ``affine``: the mapped state, before its norm."""
        return state + F.linear(F.linear(state, self.down), self.up) + self.bias

    def fused(self, deep: Sequence[torch.Tensor]) -> torch.Tensor:
        """Kind ``deep``: states of the deep layers as one feature ``(..., hidden)``."""
        return F.linear(torch.cat([self._norm(x) for x in deep], -1), self.fuse)

    def steps(
        self, state: torch.Tensor, feature: torch.Tensor | None, count: int
    ) -> list[torch.Tensor]:
        """Outputs of `count` draft steps, each ``(texts, rows, hidden)``, before the last norm.

        state    the rows' states at the exit ``(texts, rows, hidden)``
        feature  kind ``deep``: the fused feature of each row's *predecessor*
        Step k's output at a row is what the module gives there when the last k - 1 tokens up to it
        were drafted: it has seen its own outputs in place of their features.
        """
        outputs: list[torch.Tensor] = []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(count):
            if step:
                feature = F.pad(outputs[-1], (0, 0, 1, 0))[:, :-1]
            q, k, v, residual = self._project(state, feature)
            keys.append(k)
            values.append(v)
            mixed = self._attend(q, keys, values)
            hidden = residual + F.linear(mixed, self.out)
            if self.config.inner:
                x = self._norm(hidden, self.mlp_norm)
                gate, up = F.linear(x, self.gate_up).chunk(2, -1)
                hidden = hidden + F.linear(F.silu(gate) * up, self.down)
            outputs.append(hidden)
            if feature is None:
                break
        return outputs

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head sees."""
        return self._norm(hidden, self.norm)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """RMS norm in float32, whatever autocast made of `x`."""
        return F.rms_norm(x.float(), (self.config.hidden,), weight, self.config.eps)

    def _project(
        self, state: torch.Tensor, feature: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v ``(texts, heads, rows, head_dim)``, rotated, and the residual."""
        config = self.config
        x = self._norm(state, self.input_norm)
        if feature is None:
            residual = F.linear(state, self.skip)
        else:
            residual = feature + F.linear(x, self.skip)
            x = torch.cat([x, self._norm(feature, self.deep_norm)], -1)
        texts, rows = state.shape[:2]
        qkv = F.linear(x, self.qkv).view(texts, rows, -1, config.head_dim).transpose(1, 2)
        sizes = [config.heads, config.kv_heads, config.kv_heads]
        q, k, v = qkv.split_with_sizes(sizes, 1)
        turn = torch.outer(torch.arange(rows, device=state.device), self.inv_freq)
        q, k = _rotate(q, turn), _rotate(k, turn)
        group = config.heads // config.kv_heads
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), residual

    def _attend(
        self, q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Rows of step k see rows up to ``row - (k - 1)`` as of the first step, and of each later
        step t its row ``row - (k - t)``."""
        step, rows = len(keys), q.shape[2]
        if step == 1:
            mixed = F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
            return mixed.transpose(1, 2).flatten(2)
        q = q * q.shape[-1] ** -0.5
        hidden = torch.full((rows, rows), -math.inf, dtype=q.dtype, device=q.device)
        scores = q @ keys[0].mT + hidden.triu_(2 - step)
        own = [_back(k, step - t) for t, k in enumerate(keys[1:], start=2)]
        columns = [(q * k).sum(-1, keepdim=True) for k in own]
        for at, column in enumerate(columns, start=2):
            _mask_first(column, step - at)
        weights = torch.softmax(torch.cat([scores, *columns], -1).float(), -1).to(q.dtype)
        mixed = weights[..., :rows] @ values[0]
        for at, v in enumerate(values[1:], start=2):
            mixed = mixed + weights[..., rows + at - 2, None] * _back(v, step - at)
        return mixed.transpose(1, 2).flatten(2)


def _back(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Row i holds what was in row i - rows."""
    return F.pad(x, (0, 0, rows, 0))[:, :, : x.shape[2]] if rows else x


def _mask_first(column: torch.Tensor, rows: int) -> None:
    """Rows that have no predecessor so far back see nothing there."""
    if rows:
        column[:, :, :rows] = -math.inf


def _rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the two halves of each head, computed in float32."""
    cos, sin = turn.cos(), turn.sin()
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _initial(
    name: str, shape: tuple[int, ...], config: ExitConfig, generator: torch.Generator
) -> torch.Tensor:
    """Norms 1, biases 0; maps that add to a residual start at nothing, an adapter's skip map at
    the identity: training starts from the logit lens where there is one."""
    if name == "bias":
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    if name == "skip":
        return torch.zeros(shape) if config.kind == "deep" else torch.eye(shape[0])
    if name == "up":
        return torch.zeros(shape)
    weight = torch.empty(shape)
    nn.init.normal_(weight, std=shape[1] ** -0.5, generator=generator)
    return weight * (0.1 if name in ("out", "down") else 1.0)
