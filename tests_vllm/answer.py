"""Answers prompts with vLLM in this process, with one way of speculating; for the tests beside it.

    python answer.py JOB.json OUT.json

JOB has ``model`` (a folder), ``prompts`` (lists of ids), ``speculate`` (vLLM's speculative_config,
or null), ``max_tokens``, ``samplings`` (each a dict of vLLM's sampling options; all prompts are
answered with each) and ``known`` (false: as if this vLLM's runner were one the plug-in doesn't
know). OUT gets ``answers`` (ids by sampling and prompt), ``counters`` of the
speculation, by sampling, and ``sessions``: the requests that the proposer still holds at the end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def main(job_file: str, out_file: str) -> None:
    # The worker lives in this process, so that its proposer can be looked at.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_file).read_text())
    if not job["known"]:
        from hasten.plugins import _vllm_step

        _vllm_step.RUNNER = "a module that isn't there"
    llm = LLM(
        model=job["model"],
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=job["speculate"],
        seed=0,
    )
    answers, counters = [], []
    before = counted(llm)
    for sampling in job["samplings"]:
        params = SamplingParams(max_tokens=job["max_tokens"], **sampling)
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
        after = counted(llm)
        counters.append({name: after[name] - before[name] for name in COUNTERS})
        before = after
    # One more request: a step after the last answers, in which the others are freed.
    llm.generate([{"prompt_token_ids": job["prompts"][0]}], SamplingParams(max_tokens=2))
    made = {"answers": answers, "counters": counters, "sessions": sessions(llm)}
    Path(out_file).write_text(json.dumps(made))


def counted(llm: Any) -> dict[str, int]:
    """The counters now; 0 without speculation."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {name: int(values.get(metric, 0)) for name, metric in COUNTERS.items()}


def sessions(llm: Any) -> int | None:
    """Requests that hasten's proposer holds; None when another one drafts."""
    worker = llm.llm_engine.model_executor.driver_worker
    drafter = getattr(getattr(worker, "worker", worker).model_runner, "drafter", None)
    return len(drafter.requests) if hasattr(drafter, "requests") else None


if __name__ == "__main__":
    main(*sys.argv[1:])
