"""A call of `generate` as hasten reads it: what it asks for, and what is refused by name.

Everything here happens before the first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from transformers.generation import stopping_criteria as hf

from hasten.errors import ContextError, OptionError
from hasten.methods import MethodSpec, configure, parse
from hasten.plugins._hf_rules import Row
from hasten.sampling import Sampler
from hasten.targets.hf_model import CACHE_NAMES, inspect_model
from hasten.types import SamplingParams

_OWN_METHODS = "Give speculate() a method instead"
_ONE_ANSWER = "Leave it out: hasten follows one answer a row"

_REFUSED: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("num_beams", lambda v: v > 1, "beam search isn't sampling or greedy", _ONE_ANSWER),
    ("num_beam_groups", lambda v: v > 1, "beam search isn't sampling or greedy", _ONE_ANSWER),
    ("constraints", bool, "constrained beam search can't be drafted for", _ONE_ANSWER),
    ("force_words_ids", bool, "constrained beam search can't be drafted for", _ONE_ANSWER),
    ("dola_layers", bool, "DoLa decoding compares layers, which isn't done here", "Leave it out"),
    ("prompt_lookup_num_tokens", bool, "drafts too", "Use speculate('prompt-lookup')"),
    ("use_mtp", bool, "drafts too", _OWN_METHODS),
    ("assistant_early_exit", bool, "drafts too", "Use speculate('early-exit')"),
    ("is_assistant", bool, "this model would draft for another one", "Leave it out"),
    (
        "guidance_scale",
        lambda v: v != 1,
        "guidance runs the model at every step and keeps state, so it can't be asked about drafts",
        "Leave it out",
    ),
    (
        "cache_implementation",
        lambda v: v == "quantized" or "offloaded" in v,
        "hasten keeps keys and values of its own, in the model's dtype on its device",
        "Leave it out",
    ),
)
"""Options of a `GenerationConfig` that change the answer, or promise what isn't done here."""

_REFUSED_OUTPUTS = ("output_attentions", "output_hidden_states")

_UNDERSTOOD = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position")
"""Model arguments that are read here, or only say how `generate` would call the model."""


@dataclass(frozen=True, slots=True)
class Given:
    """What `generate` was given and doesn't hand on to a callable."""

    streamer: Any = None
    assistant_model: Any = None
    synced_gpus: Any = None
    cache: bool = False
    """A cache, filled or to be filled; one that `generate` made itself doesn't count."""


def given_to_generate(function: Any, frame: FrameType | None) -> Given | None:
    """What the call of `generate` that runs `function` was given; None where it can't be told.

    `frame` is that of `function`'s caller. `generate` passes its streamer on to its own loops only;
    a reader of that streamer would wait for ever for an end that nobody sends. So it is looked up
    where it is.
    """
    if frame is None or frame.f_locals.get("custom_generate") is not function:
        return None
    known = frame.f_locals
    named = known.get("kwargs", {})
    return Given(
        known.get("streamer"),
        known.get("assistant_model"),
        known.get("synced_gpus"),
        any(named.get(name) is not None for name in CACHE_NAMES),
    )


@dataclass(frozen=True, slots=True)
class Call:
    """A call, checked.

    ids         ``(rows, length)`` as `generate` has them, padding on the left
    final       end-of-sequence ids; `criteria` are the other stopping criteria, but for the length
    limit       most new tokens of a row
    pad         fills up rows that end early; None: nothing ends a row early
    as_dict     give a `GenerateDecoderOnlyOutput`, with these `scores` and `logits`
    """

    ids: torch.Tensor
    rows: tuple[Row, ...]
    processors: tuple[Any, ...]
    final: frozenset[int]
    criteria: tuple[Any, ...]
    limit: int
    pad: int | None
    sample: bool
    as_dict: bool
    scores: bool
    logits: bool


def configured(method: str | MethodSpec, options: Mapping[str, Any]) -> MethodSpec:
    """The method with `options` (Python values) added to those it names. Raises OptionError."""
    spec = parse(method)
    twice = [name for name in options if name in dict(spec.options)]
    if twice:
        raise OptionError(f"{spec.name}.{twice[0]}", "is given twice", "Give it once")
    return configure(spec.name, variant=spec.variant, **dict(spec.options), **options)


def read_call(
    model: Any,
    ids: torch.Tensor,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    config: Any,
    arguments: Mapping[str, Any],
    given: Given,
) -> Call:
    """Check a call. Raises OptionError, ContextError or CapabilityError naming what can't be done
    as plain `generate` does it."""
    inspect_model(model)
    _check_options(config, given)
    _check_arguments(arguments, ids, given)
    returns = config.num_return_sequences or 1
    rows = _rows(ids, arguments.get("attention_mask"), returns)
    _check_positions(arguments.get("position_ids"), rows)
    _check_processors(processors)
    as_dict = bool(config.return_dict_in_generate)
    call = Call(
        ids=ids,
        rows=rows,
        processors=tuple(processors),
        final=_final(criteria),
        criteria=tuple(c for c in criteria if type(c) not in (_EOS, _LENGTH)),
        limit=_limit(criteria, ids.shape[1]),
        pad=_pad(config),
        sample=bool(config.do_sample),
        as_dict=as_dict,
        scores=as_dict and bool(config.output_scores),
        logits=as_dict and bool(config.output_logits),
    )
    _check_batch(call)
    return call


_EOS, _LENGTH = hf.EosTokenCriteria, hf.MaxLengthCriteria


def _check_options(config: Any, given: Given) -> None:
    if given.assistant_model is not None:
        raise OptionError("assistant_model", "drafts too", _OWN_METHODS)
    if given.synced_gpus:
        raise OptionError("synced_gpus", "hasten runs in one process", "Leave it out")
    for name, refused, problem, hint in _REFUSED:
        value = getattr(config, name, None)
        if value is not None and refused(value):
            raise OptionError(name, problem, hint)
    for name in _REFUSED_OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name, None):
            raise OptionError(name, "they aren't collected over drafts", "Leave it out")
    mode = config.get_generation_mode().value
    if mode not in ("greedy_search", "sample"):
        name = "penalty_alpha" if mode == "contrastive_search" else "generation_config"
        raise OptionError(name, f"asks for {mode.replace('_', ' ')}", "Decode greedily or sample")


def _check_arguments(arguments: Mapping[str, Any], ids: torch.Tensor, given: Given) -> None:
    for name, value in arguments.items():
        if value is None or name in _UNDERSTOOD:
            continue
        if name not in CACHE_NAMES:
            raise OptionError(
                name, "hasten runs the model on token ids alone", "Leave it out and give input_ids"
            )
        if given.cache or _holds_tokens(value):
            raise OptionError(
                name,
                "hasten keeps keys and values of its own, and doesn't fill or read others",
                "Leave it out, and give all input_ids",
            )
    if ids.ndim != 2 or ids.shape[1] == 0:
        raise ContextError("input_ids: there are none. Give at least one token for each prompt")


def _holds_tokens(cache: Any) -> bool:
    """Whether a cache is filled; a purely recurrent one can't say."""
    if all(getattr(cache, "is_linear", None) or (False,)):
        return False
    return bool(cache.get_seq_length())


def _rows(ids: torch.Tensor, mask: torch.Tensor | None, returns: int) -> tuple[Row, ...]:
    """The batch's rows; their padding must be on the left."""
    count, length = ids.shape
    pads = [0] * count
    if mask is not None:
        if mask.shape != ids.shape:
            _refuse_mask(f"has shape {tuple(mask.shape)}, and the ids have {tuple(ids.shape)}")
        real = mask != 0
        pads = (length - real.sum(1)).tolist()
        for index, pad in enumerate(pads):
            if pad == length:
                _refuse_mask(f"leaves no token of prompt {index}")
            if not bool(real[index, pad:].all()):
                _refuse_mask(f"hides tokens of prompt {index} that aren't at its beginning")
    return tuple(Row(i, count, returns, ids[i], pads[i]) for i in range(count))


def _refuse_mask(problem: str) -> NoReturn:
    raise OptionError("attention_mask", problem, "Pad prompts on the left (padding_side='left')")


def _check_positions(positions: Any, rows: Sequence[Row]) -> None:
    """Positions must count each row's tokens from 0, as `generate` makes them."""
    if positions is None:
        return
    length = rows[0].padded.shape[0]
    counted = torch.arange(length, device=positions.device)
    # One row of positions may stand for all; some models hold several kinds of them.
    expected = torch.stack([(counted - row.pads).clamp(min=0) for row in rows])
    alike = positions.ndim >= 2 and positions.shape[-1] == length
    if alike and positions.shape[-2] != len(rows):
        expected = expected[:1]
        alike = not any(row.pads for row in rows)
    if not alike or not bool((positions == expected).all()):
        raise OptionError(
            "position_ids", "hasten counts positions from the first token", "Leave it out"
        )


def _check_processors(processors: Sequence[Any]) -> None:
    """Refuse by name what keeps state from call to call."""
    try:
        Sampler(SamplingParams(processors=tuple(processors)), 1, frozenset(), 0, 0)
    except OptionError as error:
        text = str(error).removeprefix(f"{error.option}: ")
        raise OptionError("logits_processor", text) from None


def _final(criteria: Sequence[Any]) -> frozenset[int]:
    ids = (torch.as_tensor(c.eos_token_id).reshape(-1) for c in criteria if type(c) is _EOS)
    return frozenset(int(token) for each in ids for token in each.tolist())


def _limit(criteria: Sequence[Any], length: int) -> int:
    """Most new tokens by the length criteria; at least one comes, as in plain `generate`."""
    longest = [c.max_length - length for c in criteria if type(c) is _LENGTH]
    if not longest:
        raise OptionError("max_new_tokens", "nothing limits the answer", "Give a number")
    return max(min(longest), 1)


def _pad(config: Any) -> int | None:
    pad = getattr(config, "_pad_token_tensor", None)
    pad = config.pad_token_id if pad is None else pad
    return None if pad is None else int(pad)


def _check_batch(call: Call) -> None:
    if len(call.rows) == 1:
        return
    ends = call.final or any(hasattr(c, "eos_token_id") for c in call.criteria)
    if call.criteria and not ends:
        raise OptionError(
            "stopping_criteria",
            "without an end-of-sequence id plain generate goes on writing into rows of a batch "
            "that have stopped, and hasten would pad them",
            "Give eos_token_id and pad_token_id, or one prompt at a time",
        )
    if ends and call.pad is None:
        raise OptionError("pad_token_id", "rows that end early need one", "Give pad_token_id")
