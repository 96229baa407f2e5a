"""What an EAGLE-3 drafter is: sizes, norms, tapped layers; read from both public layouts.

The first layout is that of the authors' checkpoints (the keys of a Llama model and a few beside
them), the second that of speculators (``transformer_layer_config``). Tapped layers are counted here
as hasten counts them: 0 is the embeddings, i what comes after i layers. Speculators counts the
same; ``eagle_config`` of the first layout counts the layers' outputs from 0, so its ids are smaller
by one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hasten.dflash.config import FULL, SLIDING, _rope
from hasten.errors import ModelError

logger = logging.getLogger(__name__)

_AUX = "eagle_aux_hidden_state_layer_ids"
_OTHERS = {
    "dflash": "DFlash (`--method dflash` runs it)",
    "dspark": "DSpark",
    "peagle": "P-EAGLE",
    "mtp": "multi-token prediction (MTP)",
    "medusa": "Medusa",
    "hydra": "Hydra",
    "mlpspeculator": "an MLP speculator",
}
"""Other drafters, by a part of what their descriptions call themselves."""
_KEYS = {
    "dflash_config": "dflash",
    "medusa_num_heads": "medusa",
    "hydra_num_heads": "hydra",
    "num_nextn_predict_layers": "mtp",
    "mtp_num_hidden_layers": "mtp",
}
"""Keys that descriptions of others have."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """A drafter's sizes and variants; ModelError when they contradict each other.

    vocab_size           rows of the target's head; draft_vocab_size: those drafted from (0: all)
    taps                 the target's layers whose outputs are fused, in the order of `fc`'s columns
                         (0: the embeddings); one may be named twice
    target_hidden_size   of the target; 0: as `hidden_size`
    eps                  of all norms
    head_norms           queries and keys are normalised head by head (layers of kind ``qwen3``)
    norm_before_residual the first layer adds to the *normed* feature
    norm_before_fc       one norm over all features before they are fused
    fc_norm              a norm for each feature before they are fused
    norm_output          what the next step is fed stands under the last norm, too (EAGLE-3.1)
    layer_types          ``full_attention`` or ``sliding_attention`` for each layer; (): all full
    sliding_window       positions that sliding layers see, a row's own included
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    taps: tuple[int, ...]
    draft_vocab_size: int = 0
    target_hidden_size: int = 0
    eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_positions: int = 32_768
    attention_bias: bool = False
    head_norms: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_vocab_size", self.draft_vocab_size or self.vocab_size)
        width = self.target_hidden_size or self.hidden_size
        object.__setattr__(self, "target_hidden_size", width)
        object.__setattr__(self, "layer_types", self.layer_types or (FULL,) * self.num_layers)
        if problem := self._problem():
            raise ModelError(f"not the description of an EAGLE-3 drafter: {problem}")

    def _problem(self) -> str:
        sizes = (
            self.hidden_size, self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim,
            self.intermediate_size, self.vocab_size, self.target_hidden_size,
        )  # fmt: skip
        if min(sizes) < 1 or self.head_dim % 2 or self.num_heads % self.num_kv_heads:
            return f"sizes {sizes} (head_dim must be even, heads a multiple of kv heads)"
        if not self.taps or min(self.taps) < 0:
            return f"tapped layers {list(self.taps)}"
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            return f"draft_vocab_size {self.draft_vocab_size} of {self.vocab_size} ids"
        if self.norm_before_fc and self.fc_norm:
            return "norm_before_fc and fc_norm exclude each other"
        if len(self.layer_types) != self.num_layers or set(self.layer_types) - {FULL, SLIDING}:
            return f"layer_types {list(self.layer_types)} for {self.num_layers} layers"
        if SLIDING in self.layer_types and not self.sliding_window:
            return "sliding layers without a sliding_window"
        return ""

    def to_json(self) -> dict[str, Any]:
        """Plain data in the layout of speculators, as `read_config` and vLLM read it back;
        ``speculators_config``, which names the target, isn't part of it."""
        rope = {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta}
        layer: dict[str, Any] = {
            "model_type": "qwen3" if self.head_norms else "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.eps,
            # vLLM reads the first spelling or the second, by its version of transformers.
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else dict(self.rope_scaling),
            "rope_parameters": rope,
            "attention_bias": self.attention_bias,
            "mlp_bias": False,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": False,
        }
        if self.sliding_window is not None:
            layer |= {"layer_types": list(self.layer_types), "use_sliding_window": True}
            layer["sliding_window"] = self.sliding_window
        other = self.target_hidden_size != self.hidden_size
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": self.draft_vocab_size,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "target_hidden_size": self.target_hidden_size if other else None,
            _AUX: list(self.taps),
            "embed_requires_grad": False,
            "tie_word_embeddings": False,
            "transformer_layer_config": layer,
        }


def default_taps(target_layers: int) -> tuple[int, int, int]:
    """The layers tapped where a description names none, as hasten counts them."""
    return (2, target_layers // 2, target_layers - 3)


def read_config(data: Mapping[str, Any], *, target_layers: int) -> Eagle3Config:
    """A drafter's description, in either layout, with all of their variants.

    target_layers  of the target at hand: descriptions may leave the tapped layers to a rule

    Raises ModelError for another kind of drafter (by name), for settings that would change what the
    target says, and for what isn't a description of EAGLE-3.
    """
    try:
        _refuse_others(data)
        _refuse_lossy(data)
        if "transformer_layer_config" in data:
            return _speculators(data, target_layers)
        return _first(data, target_layers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        missing = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelError(f"not the description of an EAGLE-3 drafter: {missing}") from None


# -- what it isn't -----------------------------------------------------------------------------


def _refuse_others(data: Mapping[str, Any]) -> None:
    names = [str(data.get(key) or "") for key in ("model_type", "speculators_model_type")]
    names += [str(each) for each in data.get("architectures") or ()]
    plain = re.sub("[^a-z0-9 ]", "", " ".join(names).lower())
    found = [kind for kind in _OTHERS if kind in plain]
    if "eagle3" not in plain:  # which may have kept keys of its target's
        found += [kind for key, kind in _KEYS.items() if data.get(key)]
    if found:
        raise ModelError(f"this is a drafter of {_OTHERS[found[0]]}, not of EAGLE-3: {_ANOTHER}")
    kind = data.get("speculators_model_type", "eagle3")
    if kind == "eagle" or ("eagle" in plain and "eagle3" not in plain):
        raise first_generation("its description says so")
    if kind != "eagle3":
        raise ModelError(f"this is a drafter of kind {kind!r}, not of EAGLE-3: {_ANOTHER}")


_ANOTHER = "choose an EAGLE-3 drafter made for this model"


def first_generation(why: str) -> ModelError:
    """The refusal of EAGLE-1 and EAGLE-2, which read the last layer's states alone."""
    return ModelError(
        f"this is a drafter of EAGLE-1 or EAGLE-2, another network than EAGLE-3's ({why}): "
        f"{_ANOTHER}"
    )


def _refuse_lossy(data: Mapping[str, Any]) -> None:
    """Refuse folders that ask for drafts to be kept against the target's word."""
    for method in (data.get("speculators_config") or {}).get("proposal_methods") or ():
        k, tolerance = method.get("verifier_accept_k"), method.get("accept_tolerance")
        for name, value, exact in (
            ("verifier_accept_k", int(k or 1), 1), ("accept_tolerance", float(tolerance or 0), 0),
        ):  # fmt: skip
            if value > exact:
                raise ModelError(
                    f"this drafter is meant to be verified with {name} {value}, which keeps tokens "
                    "that the model wouldn't choose. hasten's answers are the model's own: set it "
                    f"to {exact} in the folder's config.json"
                )


# -- the two layouts ---------------------------------------------------------------------------


def _first(data: Mapping[str, Any], target_layers: int) -> Eagle3Config:
    """The authors' layout, with the keys that other trainers put beside it."""
    own = data.get("eagle_config") or {}
    if own.get("use_aux_hidden_state") is False:
        raise first_generation("use_aux_hidden_state is off")
    outputs = own.get(_AUX)
    taps = data.get(_AUX) if outputs is None else [int(each) + 1 for each in outputs]
    return _config(data, data, taps, target_layers)


def _speculators(data: Mapping[str, Any], target_layers: int) -> Eagle3Config:
    """The layout of speculators. It always writes ``norm_before_residual``, and a wrong value ruins
    the drafts without any error: a folder without it is talked about."""
    if "norm_before_residual" not in data:
        logger.warning(
            "the drafter's config.json doesn't say norm_before_residual: it is taken for false. "
            "If few drafts are kept, set it to true there"
        )
    return _config(data, data["transformer_layer_config"], data.get(_AUX), target_layers)


def _config(
    own: Mapping[str, Any],
    inner: Mapping[str, Any],
    taps: Sequence[Any] | None,
    target_layers: int,
) -> Eagle3Config:
    """`own` holds the keys of EAGLE-3, `inner` those of its layers."""
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    switches: dict[str, Any] = {name: bool(own.get(name, False)) for name in names}
    return Eagle3Config(
        **_transformer(inner),
        taps=_taps(taps, target_layers),
        draft_vocab_size=int(own.get("draft_vocab_size") or 0),
        target_hidden_size=int(own.get("target_hidden_size") or 0),
        **switches,
    )


def _taps(named: Sequence[Any] | None, target_layers: int) -> tuple[int, ...]:
    taps = default_taps(target_layers) if named is None else tuple(int(each) for each in named)
    if target_layers in taps:
        raise ModelError(
            f"this drafter taps the target's last state ({target_layers}), which stands under the "
            "last norm where it was trained: hasten can't give it that. Choose another"
        )
    if not all(0 <= each < target_layers for each in taps):
        raise ModelError(f"it taps layers {list(taps)} of a target that has {target_layers}")
    return taps


def _transformer(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that any decoder of these families has."""
    kind, act = data.get("model_type") or "llama", data.get("hidden_act") or "silu"
    if kind not in ("llama", "qwen3"):
        raise ModelError(f"its layers are of kind {kind!r}: hasten has those of llama and qwen3")
    if act != "silu" or data.get("mlp_bias"):
        raise ModelError(f"an EAGLE-3 drafter has silu and no bias in its MLP, this one {act!r}")
    theta, scaling = _rope(data)
    heads = int(data["num_attention_heads"])
    window = data.get("sliding_window") if data.get("use_sliding_window", True) else None
    types = (data.get("layer_types") if window else None) or ()
    return {
        "hidden_size": int(data["hidden_size"]),
        "num_layers": int(data.get("num_hidden_layers") or 1),
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
        "head_norms": kind == "qwen3",
        "layer_types": tuple(types),
        "sliding_window": int(window) if window and SLIDING in types else None,
    }
