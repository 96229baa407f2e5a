"""An LLM over a tiny random Llama and a byte-level tokenizer, and a meter of what it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hasten.api import LLM

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 192
PLAIN: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=core, additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(**changes: Any) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.4,
        "bos_token_id": None,
        "eos_token_id": 257,
        "pad_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return hf.LlamaForCausalLM(hf.LlamaConfig(**{**shape, **changes})).eval()


class Meter:
    """Counts a target's open sequences and the prompt rows it runs."""

    def __init__(self, llm: LLM) -> None:
        self.live = self.rows = 0
        target: Any = llm.target
        self._open, self._close, self._prefill = target.open, target.close, target.prefill
        self._known: set[int] = set()
        target.open, target.close, target.prefill = self.open, self.close, self.prefill

    def open(self, *args: Any, **kwargs: Any) -> Any:
        sequence = self._open(*args, **kwargs)
        self._known.add(id(sequence))
        self.live += 1
        return sequence

    def close(self, sequence: Any) -> None:
        if id(sequence) in self._known:
            self._known.remove(id(sequence))
            self.live -= 1
        self._close(sequence)

    def prefill(self, sequence: Any, tokens: Sequence[int], **kwargs: Any) -> Any:
        self.rows += len(tokens)
        return self._prefill(sequence, tokens, **kwargs)


@contextmanager
def metered(llm: LLM) -> Iterator[LLM]:
    """Count on `llm.target` (`meter`); fails when a sequence is left open, what is kept apart."""
    target: Any = llm.target
    before = {name: getattr(target, name) for name in ("open", "close", "prefill")}
    counted = Meter(llm)
    yield llm
    llm.forget()
    for name, method in before.items():
        setattr(target, name, method)
    assert counted.live == 0, "a sequence was left open"


def meter(llm: LLM) -> Meter:
    """The meter of a `metered` LLM."""
    target: Any = llm.target
    found: Meter = target.prefill.__self__
    return found


def reference(llm: LLM, ids: Sequence[int], count: int) -> list[int]:
    """Greedy ids by whole passes, without a cache."""
    out = list(ids)
    target = llm.target
    for _ in range(count):
        sequence = target.open()
        logits = target.prefill(sequence, out).logits
        target.close(sequence)
        assert logits is not None
        out.append(int(logits[-1].argmax()))
    return out[len(ids) :]
