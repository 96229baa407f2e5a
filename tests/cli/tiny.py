"""A tiny random Llama with a byte tokenizer, saved as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CONTEXT = 256


def save_tiny(
    folder: Path, *, template: bool = True, family: str = "llama", head_dim: int = 8
) -> Path:
    """Write the model (`family` llama or gpt2) and its tokenizer; the same weights each time.

    The native kernels take a `head_dim` of 16, not of 8.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    tokenizer = _byte_tokenizer(template)
    tokenizer.save_pretrained(folder)
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any
        if family == "gpt2":
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT}
            model = GPT2LMHeadModel(GPT2Config(**common, **sizes))
        else:
            model = LlamaForCausalLM(
                LlamaConfig(
                    **common,
                    hidden_size=32,
                    intermediate_size=48,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    head_dim=head_dim,
                    max_position_embeddings=CONTEXT,
                    tie_word_embeddings=True,
                )
            )
    model.save_pretrained(folder)
    return folder


def _byte_tokenizer(template: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    if template:
        tokenizer.chat_template = TEMPLATE
    return tokenizer
