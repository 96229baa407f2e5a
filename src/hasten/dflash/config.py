"""What a DFlash drafter is: sizes, block, tapped layers; read from every layout seen so far.

Two layouts are known: that of the first checkpoints (``dflash_config`` beside the keys of a Qwen3
model) and that of speculators (``transformer_layer_config``). Layer ids here are always those of
the first: id l is the *output* of the target's layer l, counted from 0. Speculators counts the
embeddings as 0, so its ids are larger by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_KINDS = ("default", "linear", "yarn", "llama3")
"""Rotary scalings that don't depend on a text's length."""
OTHERS = ("dflash2", "dspark")
"""Algorithms of a like name that are something else."""
_BOTTLENECK = 256
"""Width of the length head where a description that has one doesn't say."""


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """A drafter's sizes; ModelError when they contradict each other.

    vocab_size             rows of the target's head; draft_vocab_size: those drafted from (0: all)
    num_target_layers      of the target; 0: not said
    block_size             slots of a block, the anchor's included
    mask_token_id          the id (in the target's embeddings) that stands in the other slots
    target_layer_ids       layers, from 0, whose outputs are tapped, in the order of `fc`'s columns
    eps                    of all norms
    layer_types            ``full_attention`` or ``sliding_attention`` for each layer; (): all full
    sliding_window         rows of the context before the anchor that sliding layers see
    sliding_window_non_causal  slots of a block see later ones in sliding layers too
    length_head            width inside the length head; 0: there is none
    lookahead              rows that the length head's label counts beyond the matched drafts
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_target_layers: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    draft_vocab_size: int = 0
    eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_positions: int = 32_768
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    sliding_window_non_causal: bool = True
    length_head: int = 0
    lookahead: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_vocab_size", self.draft_vocab_size or self.vocab_size)
        object.__setattr__(self, "layer_types", self.layer_types or (FULL,) * self.num_layers)
        if problem := self._problem():
            raise ModelError(f"not the description of a DFlash drafter: {problem}")

    def _problem(self) -> str:
        sizes = (
            self.hidden_size, self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim,
            self.intermediate_size, self.vocab_size,
        )  # fmt: skip
        if min(sizes) < 1 or self.head_dim % 2 or self.num_heads % self.num_kv_heads:
            return f"sizes {sizes} (head_dim must be even, heads a multiple of kv heads)"
        if self.block_size < 2:
            return f"block_size must be at least 2, got {self.block_size}"
        if not 0 <= self.mask_token_id < self.vocab_size:
            return f"mask_token_id {self.mask_token_id} isn't in 0..{self.vocab_size - 1}"
        top = self.num_target_layers or 1 << 30
        ids = self.target_layer_ids
        if not ids or len(set(ids)) < len(ids) or not all(-1 <= each < top for each in ids):
            return f"target_layer_ids {list(ids)} of a target with {self.num_target_layers} layers"
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            return f"draft_vocab_size {self.draft_vocab_size} of {self.vocab_size} ids"
        if len(self.layer_types) != self.num_layers or set(self.layer_types) - {FULL, SLIDING}:
            return f"layer_types {list(self.layer_types)} for {self.num_layers} layers"
        if SLIDING in self.layer_types and not self.sliding_window:
            return "sliding layers without a sliding_window"
        if not (self.eps > 0 and self.rope_theta > 0):
            return f"rms_norm_eps {self.eps} and rope_theta {self.rope_theta} (must be above 0)"
        if self.length_head < 0:
            return f"length_head must be at least 0, got {self.length_head}"
        return ""

    @property
    def taps(self) -> tuple[int, ...]:
        """The tapped layers as hasten numbers them: 0 is the embeddings, i what comes after i
        layers."""
        return tuple(each + 1 for each in self.target_layer_ids)

    def to_json(self) -> dict[str, Any]:
        """Plain data in the first layout, as `read_config` reads it back. What no other reader
        knows stands under ``hasten``."""
        dflash: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
        }
        if self.length_head:
            dflash |= {
                "use_thresh_head_two_model": True,
                "thresh_head_direct_len": True,
                "thresh_head_bottleneck_dim": self.length_head,
            }
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": dflash,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "attention_bias": self.attention_bias,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else dict(self.rope_scaling),
            "max_position_embeddings": self.max_positions,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            "sliding_window_non_causal": self.sliding_window_non_causal,
            "num_target_layers": self.num_target_layers,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "hasten": {"draft_vocab_size": self.draft_vocab_size, "lookahead": self.lookahead},
        }


def read_config(data: Mapping[str, Any], *, target_layers: int = 0) -> DFlashConfig:
    """A drafter's description, in either layout, with all of their variants.

    target_layers  of the target at hand, for descriptions that leave its layers to a rule

    Raises ModelError for another algorithm (by name), and for what isn't a description of DFlash.
    """
    _refuse_others(data)
    try:
        if "transformer_layer_config" in data:
            return _speculators(data, target_layers)
        return _first(data, target_layers)
    except (KeyError, TypeError, ValueError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"not the description of a DFlash drafter: {missing}") from None


def default_layers(target_layers: int, taps: int) -> tuple[int, ...]:
    """The layers tapped where a description of the first layout names none: from the second to the
    third from the end, evenly; a single one in the middle."""
    if taps == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps))


def _refuse_others(data: Mapping[str, Any]) -> None:
    keys = ("model_type", "speculators_model_type", "architectures", "auto_map")
    names = [str(data[key]) for key in keys if data.get(key)]
    plain = " ".join(names).lower().replace("_", "").replace("-", "")
    for other in OTHERS:
        if other in plain:
            raise ModelError(
                f"this is a drafter of {other}, another algorithm than DFlash ({', '.join(names)}):"
                " hasten can't run it. Choose a DFlash drafter"
            )
    kind = data.get("speculators_model_type", "dflash")
    if kind != "dflash":
        raise ModelError(f"this is a drafter of kind {kind!r}, not of DFlash: choose another")
    if data.get("sample_from_anchor"):
        raise ModelError(
            "this drafter takes a token from the anchor's own slot (sample_from_anchor, as DSpark "
            "does), which DFlash's block has no place for: choose a drafter of DFlash"
        )


def _first(data: Mapping[str, Any], target_layers: int) -> DFlashConfig:
    """The layout of the first checkpoints: what is DFlash's own stands in ``dflash_config``, or
    beside it."""
    own = data.get("dflash_config") or {}
    block = data["block_size"] if data.get("block_size") else own["block_size"]
    mask = own["mask_token_id"] if "mask_token_id" in own else data["mask_token_id"]
    layers = int(data.get("num_target_layers") or target_layers)
    ids = own.get("target_layer_ids", data.get("target_layer_ids"))
    if ids is None:
        if not layers:
            raise ModelError(
                "the description names neither the target's layers nor which are tapped: add "
                "num_target_layers"
            )
        ids = default_layers(layers, int(data["num_hidden_layers"]))
    hasten = data.get("hasten") or {}
    return DFlashConfig(
        **_transformer(data),
        num_target_layers=layers,
        block_size=int(block),
        mask_token_id=int(mask),
        target_layer_ids=_whole(ids),
        draft_vocab_size=int(hasten.get("draft_vocab_size") or 0),
        sliding_window_non_causal=bool(data.get("sliding_window_non_causal", True)),
        length_head=_length_head(own),
        lookahead=int(hasten.get("lookahead", 1)),
    )


def _length_head(own: Mapping[str, Any]) -> int:
    """The width of a length head that says how much of a block to verify; others (thresholds on
    confidences, older heads) are left alone: the drafter works without them."""
    if not own.get("use_thresh_head_two_model") or not own.get("thresh_head_direct_len"):
        return 0
    return int(own.get("thresh_head_bottleneck_dim") or _BOTTLENECK)


def _speculators(data: Mapping[str, Any], target_layers: int) -> DFlashConfig:
    """The layout of speculators: layer ids count the embeddings, sliding layers are causal inside
    a block unless said otherwise."""
    ids = data.get("aux_hidden_state_layer_ids")
    if ids is None:
        if not target_layers:
            raise ModelError("the description doesn't say which layers are tapped, nor how many")
        ids = (2, target_layers // 2, target_layers - 3)
    if target_layers and target_layers in ids:
        raise ModelError(
            f"this drafter taps the target's last state ({target_layers}), which stands under the "
            "last norm there: hasten can't give it that. Choose another"
        )
    inner = data["transformer_layer_config"]
    return DFlashConfig(
        **_transformer(inner),
        num_target_layers=target_layers,
        block_size=int(data["block_size"]),
        mask_token_id=int(data["mask_token_id"]),
        target_layer_ids=tuple(each - 1 for each in _whole(ids)),
        draft_vocab_size=int(data.get("draft_vocab_size") or 0),
        sliding_window_non_causal=bool(data.get("sliding_window_non_causal", False)),
    )


def _transformer(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that any decoder of this family has."""
    act = data.get("hidden_act", "silu")
    if act != "silu" or data.get("mlp_bias"):
        raise ModelError(f"a DFlash drafter has silu and no bias in its MLP, this one {act!r}")
    theta, scaling = _rope(data)
    layers = int(data["num_hidden_layers"])
    window = data.get("sliding_window") if data.get("use_sliding_window", True) else None
    types = data.get("layer_types") if window else None
    heads = int(data["num_attention_heads"])
    return {
        "hidden_size": int(data["hidden_size"]),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": int(data.get("num_key_value_heads") or heads),
        "head_dim": int(data.get("head_dim") or data["hidden_size"] // heads),
        "intermediate_size": int(data["intermediate_size"]),
        "vocab_size": int(data["vocab_size"]),
        "eps": float(data.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_positions": int(data.get("max_position_embeddings") or 32_768),
        "attention_bias": bool(data.get("attention_bias", False)),
        "layer_types": tuple(types or ()),
        "sliding_window": int(window) if window and SLIDING in (types or ()) else None,
    }


def _rope(data: Mapping[str, Any]) -> tuple[float, Mapping[str, Any] | None]:
    """The base, and the scaling where there is one; in either of transformers' spellings."""
    scaling = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    theta = float(data.get("rope_theta") or scaling.pop("rope_theta", 0) or 10_000.0)
    scaling.pop("rope_theta", None)
    kind = scaling.get("rope_type", scaling.pop("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"rotary scaling {kind!r} isn't supported in a drafter, only {', '.join(ROPE_KINDS)}"
        )
    return theta, None if kind == "default" else {**scaling, "rope_type": kind}


def _whole(ids: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(each) for each in ids)
