"""``hasten info``: what a model is, how it runs here, and what works with it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.text import Text

from hasten.cli import options as opt
from hasten.cli.screen import grid, load_model, out, print_json, table

if TYPE_CHECKING:
    from hasten.api import LLM
    from hasten.targets.base import Target


@opt.loads
def info(
    model: opt.Name = None,
    json: opt.Json = False,
    *,
    loading: opt.Loading,
) -> None:
    """Show what a model is, which engine runs it and why, and which methods work."""
    llm = load_model(model, "ar", **loading)
    facts = _facts(llm, model, loading.get("engine"), loading.get("kernels"))
    if json:
        print_json(facts)
    else:
        _print(facts)


def _facts(llm: LLM, model: str | None, engine: str | None, kernels: str | None) -> dict[str, Any]:
    target = llm.target
    about = target.info
    parameters = _parameters(model)
    return {
        "name": about.name,
        "architecture": about.architecture,
        "engine": about.engine,
        "engine_reason": _why(target, model, engine),
        "kernels": about.kernels,
        "kernels_reason": _why_kernels(target, kernels),
        "quantize": about.quantize,
        "precision": about.precision,
        "dtype": str(about.dtype).removeprefix("torch."),
        "device": str(about.device),
        "context_limit": about.context_limit,
        "vocab_size": about.vocab_size,
        "layers": about.num_layers,
        "hidden_size": about.hidden_size,
        "eos_ids": sorted(about.eos_ids),
        "chat_template": bool(getattr(llm.tokenizer, "chat_template", None)),
        "parameters": parameters,
        "weight_bytes": _weight_bytes(target, parameters),
        "fingerprint": about.fingerprint,
        "capabilities": asdict(target.capabilities),
        "methods": _working(target),
    }


def _why(target: Target, model: str | None, engine: str | None) -> str:
    """Why this engine runs the model, as a sentence part."""
    if target.info.engine == "fused":
        return "hasten's own decoder runs its kind of blocks"
    if engine == "transformers":
        return "as asked"
    from transformers import AutoConfig

    from hasten.targets.catalog import prepare, resolve
    from hasten.targets.engine import why_not_fused

    config = AutoConfig.from_pretrained(prepare(resolve(model)))
    return (
        why_not_fused(config, device=target.info.device)
        or "its weights are not in safetensors files"
    )


def _why_kernels(target: Target, kernels: str | None) -> str:
    """Why these kernels run the fused engine, as a sentence part; empty for another engine."""
    if target.info.kernels == "native":
        return "hasten's own, compiled for this processor"
    if target.info.kernels == "torch" and kernels != "torch":
        from hasten.native.library import why_not_quick
        from hasten.targets.fused import FusedTarget

        assert isinstance(target, FusedTarget)
        shape = target.shape
        return f"not hasten's own: {why_not_quick(shape.dtype, shape.device, shape.head_dim)}"
    return "as asked" if target.info.kernels else ""


def _weight_bytes(target: Target, parameters: int | None) -> int | None:
    """Bytes of the weights as they are held, or as the dtype holds the checkpoint's."""
    held = getattr(target, "weight_bytes", 0)
    return held or (None if parameters is None else parameters * target.info.dtype.itemsize)


def _parameters(model: str | None) -> int | None:
    """How many numbers the checkpoint holds; None where they aren't in safetensors files."""
    from hasten.targets.catalog import prepare, resolve
    from hasten.targets.checkpoint import SafetensorsFolder, has_safetensors

    folder = prepare(resolve(model))
    if not has_safetensors(folder):
        return None
    return sum(tensor.numel() for tensor in SafetensorsFolder(folder).values())


def _working(target: Target) -> dict[str, str]:
    """For each method ``"yes"``, or what is in the way."""
    from hasten.methods import all_methods

    have = target.capabilities
    out: dict[str, str] = {}
    for name, method in all_methods().items():
        missing = [need.replace("_", " ") for need in method.requires if not getattr(have, need)]
        if missing:
            out[name] = f"no: needs {', '.join(missing)}"
        elif method.trees and not have.tree:
            out[name] = "yes, drafting chains instead of trees"
        else:
            out[name] = "yes" if method.needs == "nothing" else f"yes, with {method.needs}"
    return out


def _print(facts: dict[str, Any]) -> None:
    console = out()
    rows = grid()
    rows.add_row(
        "model",
        f"{facts['name']}: {facts['architecture']}, "
        f"{facts['layers']} layers of {facts['hidden_size']}",
    )
    rows.add_row("engine", f"{facts['engine']}: {facts['engine_reason']}")
    if facts["kernels"]:
        rows.add_row("kernels", f"{facts['kernels']}: {facts['kernels_reason']}")
    rows.add_row("runs in", f"{facts['precision']} on {facts['device']}")
    if facts["parameters"] is not None:
        size = facts["weight_bytes"] / 2**20
        rows.add_row(
            "weights",
            f"{facts['parameters'] / 1e6:.1f} million, {size:,.0f} MiB in {facts['precision']}",
        )
    rows.add_row("context", f"{facts['context_limit']:,} tokens")
    rows.add_row("vocabulary", f"{facts['vocab_size']:,} ids")
    rows.add_row("answers end at", ", ".join(f"id {i}" for i in facts["eos_ids"]) or "no id")
    rows.add_row(
        "chat template", "yes" if facts["chat_template"] else "no: prompts go in as they are"
    )
    able = {k: v for k, v in facts["capabilities"].items() if isinstance(v, bool)}
    rows.add_row("can", ", ".join(k.replace("_", " ") for k, v in able.items() if v))
    lacking = ", ".join(k.replace("_", " ") for k, v in able.items() if not v)
    if lacking:
        rows.add_row("can't", lacking)
    for note in facts["capabilities"]["notes"]:
        rows.add_row("", note)
    rows.add_row("fingerprint", facts["fingerprint"] or "none")
    console.print(rows)
    works = table("method", "works")
    for name, verdict in facts["methods"].items():
        works.add_row(Text(name, style="bold"), verdict)
    console.print(works)
