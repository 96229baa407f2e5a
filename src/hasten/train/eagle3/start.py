"""What a drafter begins as: its sizes, and its first weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hasten.dflash.config import SLIDING
from hasten.eagle3 import store
from hasten.eagle3.config import Eagle3Config, default_taps
from hasten.eagle3.net import Eagle3Net
from hasten.errors import OptionError
from hasten.targets.fused import FusedTarget
from hasten.train.dflash.start import _SPREAD, _TIMID
from hasten.train.eagle3.options import Options, Shape


def make_config(target: FusedTarget, shape: Shape, vocabulary: int) -> Eagle3Config:
    """The description of a new drafter for `target`. Raises OptionError for layers it hasn't."""
    info, sizes = target.info, target.shape
    taps = tuple(each + 1 for each in shape.taps) or default_taps(info.num_layers)
    # The last layer's output is left alone: other programs find it under the last norm.
    if not all(1 <= tap < info.num_layers for tap in taps):
        problem = f"must be layers from 0 to {info.num_layers - 2}, got {[t - 1 for t in taps]}"
        raise OptionError("taps", problem)
    return Eagle3Config(
        hidden_size=info.hidden_size,
        num_layers=1,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.inner,
        vocab_size=info.vocab_size,
        taps=taps,
        draft_vocab_size=vocabulary,
        eps=sizes.eps,
        rope_theta=shape.rope_theta,
        max_positions=info.context_limit,
        norm_before_residual=shape.norm_before_residual,
        norm_before_fc=shape.norm_before_fc,
    )


def new_net(
    target: FusedTarget, config: Eagle3Config, ids: Sequence[int] | None, options: Options
) -> Eagle3Net:
    """First weights, float32 on the target's device: random; with ``init=target`` the head has the
    target's rows of `ids` (None: all) and the last norm half of the target's. The global generators
    stay as they are."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(options.seed)
        net = Eagle3Net(config)
        for module in net.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=_SPREAD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    net = net.float().to(target.info.device)
    if options.init == "target":
        ends = target.ends()
        with torch.no_grad():
            net.lm_head.weight.copy_(ends.head if ids is None else ends.head[list(ids)])
            net.norm.weight.copy_(_TIMID * ends.norm)
    return net


def from_folder(
    target: FusedTarget, folder: str
) -> tuple[Eagle3Net, list[int] | None, torch.Tensor | None]:
    """A drafter to go on from, in float32 and ready to be trained, its draft vocabulary (None: all)
    and its own table of embeddings (None: the target's). Raises ModelError for what isn't a
    drafter, or another model's, and OptionError for one that can't be trained here."""
    loaded = store.load(folder, target.info, dtype=torch.float32)
    if SLIDING in loaded.config.layer_types or 0 in loaded.config.taps:
        what = "sliding layers" if SLIDING in loaded.config.layer_types else "a tap at embeddings"
        raise OptionError("init", f"the drafter in {folder} has {what}: it can't be trained here")
    ids = None if loaded.draft_ids is None else [int(each) for each in loaded.draft_ids.tolist()]
    if ids is not None and ids != sorted(ids):
        raise OptionError("init", f"the ids of the drafter in {folder} aren't in order")
    net: Any = loaded.net.train().requires_grad_(True)
    return net, ids, loaded.embeddings
