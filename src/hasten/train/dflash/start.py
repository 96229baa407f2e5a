"""What a drafter begins as: its sizes, its draft vocabulary, its mask token, its first weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hasten.dflash import store
from hasten.dflash.config import DFlashConfig, default_layers
from hasten.dflash.net import DFlashNet
from hasten.errors import CapabilityError, OptionError
from hasten.targets.fused import FusedTarget
from hasten.train.dflash.options import Options, Shape
from hasten.train.features import Text

_SPREAD = 0.02
"""Standard deviation of random weights."""
_TIMID = 0.5
"""First weights of the last norm over those that would make the target's own logits: a drafter that
is often wrong does better to be unsure, and learns from smaller gradients."""


def make_config(
    target: FusedTarget, shape: Shape, *, mask_token: int, vocabulary: int, lookahead: int
) -> DFlashConfig:
    """The description of a new drafter for `target`. Raises OptionError for layers it hasn't."""
    info, sizes = target.info, target.shape
    taps = shape.taps or default_layers(info.num_layers, shape.tap_count)
    # The last layer's output is left alone: other programs find it under the last norm.
    if len(set(taps)) < len(taps) or not all(0 <= tap < info.num_layers - 1 for tap in taps):
        raise OptionError(
            "taps", f"must be different layers from 0 to {info.num_layers - 2}, got {taps}"
        )
    return DFlashConfig(
        hidden_size=info.hidden_size,
        num_layers=shape.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.inner,
        vocab_size=info.vocab_size,
        num_target_layers=info.num_layers,
        block_size=shape.block,
        mask_token_id=mask_token,
        target_layer_ids=tuple(taps),
        draft_vocab_size=vocabulary,
        eps=sizes.eps,
        rope_theta=shape.rope_theta,
        max_positions=info.context_limit,
        length_head=shape.head,
        lookahead=lookahead,
    )


def draft_vocabulary(texts: Iterable[Text], size: int, keep: Iterable[int]) -> list[int]:
    """The `size` ids most frequent in the answers, those in `keep` among them; increasing."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.output)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return sorted(list(dict.fromkeys([*keep, *ranked]))[:size])


def mask_token(
    target: FusedTarget, tokenizer: Any, texts: Sequence[Text], asked: int | None
) -> int:
    """The id whose embedding stands in empty slots: the one asked for, else a row that the
    tokenizer doesn't know, else the last special token that ends nothing and stands in no text.
    Raises OptionError when there is none."""
    info = target.info
    if asked is not None:
        if not 0 <= asked < info.vocab_size:
            raise OptionError("mask_token", f"must be from 0 to {info.vocab_size - 1}, got {asked}")
        return asked
    known = len(tokenizer) if tokenizer is not None else 0
    if 0 < known < info.vocab_size:
        return known
    used = {token for text in texts for token in (*text.prompt, *text.output)}
    special = set(getattr(tokenizer, "all_special_ids", ())) | set(
        getattr(tokenizer, "added_tokens_decoder", ())
    )
    free = [each for each in special - used - info.eos_ids if 0 <= each < info.vocab_size]
    if not free:
        raise OptionError(
            "mask_token", "no special token is free", "Name an id that no text has: --mask-token"
        )
    return int(max(free))


def new_net(target: FusedTarget, config: DFlashConfig, options: Options) -> DFlashNet:
    """First weights, on the target's device: random, or from the target's own layers; the global
    generators stay as they are."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(options.seed)
        net = DFlashNet(config)
        for module in net.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=_SPREAD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    net = net.float().to(target.info.device)
    ends = target.ends()
    with torch.no_grad():
        if options.init == "random":
            # Logits of about unit variance where hidden states know nothing of the head.
            net.norm.weight.fill_(_TIMID / float(ends.head.float().norm(dim=1).mean()))
        else:
            net.norm.weight.copy_(_TIMID * ends.norm)
            _from_target(net, target)
    return net


def _from_target(net: DFlashNet, target: FusedTarget) -> None:
    """Context rows begin as the last tap; layers take values, output and MLP of the target's
    layers that follow it. Queries and keys stay random: they are normalised here, there not."""
    config, size = net.config, net.config.hidden_size
    net.fc.weight.zero_()
    last = max(range(len(config.target_layer_ids)), key=config.target_layer_ids.__getitem__)
    net.fc.weight[:, last * size : (last + 1) * size] = torch.eye(size, device=net.fc.weight.device)
    first = min(config.target_layer_ids[last] + 1, target.info.num_layers - config.num_layers)
    layer: Any
    for index, layer in enumerate(net.layers):
        source = target.torch_decoder.layers[(max(first, 0) + index) % target.info.num_layers]
        shape = target.shape
        values = source.qkv.dense()[-shape.kv_heads * shape.head_dim :]
        gate, up = _unfolded(source.gate_up.dense(), source.mlp_norm, size).chunk(2)
        pairs = (
            (layer.self_attn.v_proj, _unfolded(values, source.attention_norm, size)),
            (layer.self_attn.o_proj, source.out.dense()),
            (layer.mlp.gate_proj, gate),
            (layer.mlp.up_proj, up),
            (layer.mlp.down_proj, source.down.dense()),
        )
        for linear, weight in pairs:
            linear.weight.copy_(weight)


def _unfolded(weight: torch.Tensor, norm: torch.Tensor | None, size: int) -> torch.Tensor:
    """The weight with the norm before it folded in, for inputs of unit mean square."""
    return weight.float() / math.sqrt(size) if norm is None else weight.float() * norm.float()


def from_folder(
    target: FusedTarget, folder: str, options: Options, *, add_head: bool = True
) -> tuple[DFlashNet, list[int] | None]:
    """A drafter to go on from, in float32 and ready to be trained, with its draft vocabulary (None:
    whole). It keeps its sizes; with `add_head` a length head is added where it has none and one is
    asked for. Raises ModelError for what isn't a drafter, or another model's, CapabilityError for
    one that can't be trained here."""
    loaded = store.load(folder, target.info, dtype=torch.float32)
    config, fresh = loaded.config, False
    if 0 in config.taps:
        raise CapabilityError(
            f"the drafter in {folder} taps the model's embeddings, and training has the states of "
            "layers only: name another, or begin with init=target"
        )
    if add_head and options.shape.head and not config.length_head:
        width, lookahead = options.shape.head, options.head.lookahead
        config, fresh = replace(config, length_head=width, lookahead=lookahead), True
    net = new_net(target, config, replace(options, init="random"))
    net.load_state_dict(loaded.net.state_dict(), strict=not fresh)
    ids = None if loaded.draft_ids is None else [int(each) for each in loaded.draft_ids.tolist()]
    return net, ids
