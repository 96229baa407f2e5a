"""Batched decoding: a row is what plain decoding of its prompt gives, whatever runs beside it."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy import stats

from hasten.errors import CacheStateError, ContextError, ModelError, OptionError
from hasten.targets import fused_batch
from hasten.targets.fused import FusedTarget
from hasten.targets.fused_batch import FusedBatch
from hasten.train.batched import BatchDecoder, Job, keep_freed_memory
from tests.targets import tiny_models as tiny
from tests.targets.fused_models import KINDS, fused, random_model

EOS = frozenset(range(8))
"""Many of them, so that answers of a random model end early, at different lengths."""


@pytest.fixture(scope="module")
def target() -> FusedTarget:
    return fused(random_model(), kernels="torch")


def plain(target: FusedTarget, prompt: Sequence[int], most: int, stop: Any = EOS) -> list[int]:
    """Greedy ids of one prompt, by the target's own cache."""
    sequence, out = target.open(), []
    logits = target.prefill(sequence, prompt).logits
    while True:
        assert logits is not None
        out.append(int(logits[-1].argmax()))
        if out[-1] in stop or len(out) == min(most, tiny.CONTEXT - len(prompt)):
            break
        logits = target.prefill(sequence, [out[-1]]).logits
    target.close(sequence)
    return out


def some_prompts(count: int, longest: int = 60, begin: Sequence[int] = (), seed: int = 0) -> Any:
    rng = random.Random(seed)
    return [
        [*begin, *(rng.randrange(8, tiny.VOCAB) for _ in range(rng.randint(1, longest)))]
        for _ in range(count)
    ]


def answers(target: FusedTarget, prompts: Any, most: int = 40, **more: Any) -> list[list[int]]:
    """Outputs in the order of the prompts."""
    options = {"rows": 16, "stop_ids": EOS, **more}
    jobs = [Job(prompt, most, tag=at) for at, prompt in enumerate(prompts)]
    done = list(BatchDecoder(target, **options).run(jobs))
    assert sorted(job.tag for job in done) == list(range(len(prompts)))
    return [job.output for job in sorted(done, key=lambda job: job.tag)]


@pytest.mark.parametrize("kind", ["multi-query", "biases", "wide-heads", "yarn-rope", "qwen3-bias"])
def test_each_row_is_plain_decoding_of_its_prompt(kind: str) -> None:
    target = fused(random_model(KINDS[kind]), kernels="torch")
    prompts = some_prompts(8)
    assert answers(target, prompts, 24) == [plain(target, prompt, 24) for prompt in prompts]


def test_rows_survive_early_ends_compaction_and_widening(
    target: FusedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_batch, "_STEP", 8)
    kept, sizes = [], set()
    keep, step = FusedBatch.keep, FusedBatch.step

    def keeping(self: FusedBatch, rows: Sequence[int]) -> None:
        kept.append((len(self), len(rows)))
        keep(self, rows)

    def stepping(self: FusedBatch, tokens: torch.Tensor) -> torch.Tensor:
        logits = step(self, tokens)
        sizes.add(self._width)
        return logits

    monkeypatch.setattr(FusedBatch, "keep", keeping)
    monkeypatch.setattr(FusedBatch, "step", stepping)
    prompts = some_prompts(40, seed=1)
    want = [plain(target, prompt, 40) for prompt in prompts]
    assert answers(target, prompts) == want
    assert len({len(output) for output in want}) > 5
    assert len(kept) > 4
    assert all(after < 0.8 * before for before, after in kept)
    assert len(sizes) > 4


def test_prompts_run_in_pieces_and_what_they_share_once(
    target: FusedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_batch, "_PASS_ROWS_CPU", 16)
    prompts = some_prompts(10, longest=30, begin=range(20, 53), seed=2)
    prompts += [prompts[0], prompts[0][:40]]
    want = [plain(target, prompt, 1) for prompt in prompts]
    before = target.layer_rows
    assert answers(target, prompts, 1) == want
    ran = (target.layer_rows - before) // target.info.num_layers
    tails = sum(len(prompt) - 33 for prompt in prompts)
    assert 33 + tails <= ran < 33 + 1.3 * tails


def test_equal_prompts_and_one_prompt_alone_are_fine(target: FusedTarget) -> None:
    (prompt,) = some_prompts(1)
    want = plain(target, prompt, 40)
    assert answers(target, [prompt]) == [want]
    assert answers(target, [prompt] * 3) == [want] * 3
    assert answers(target, [[9], [9], [10, 11]]) == [
        plain(target, p, 40) for p in ([9], [9], [10, 11])
    ]


def test_lengths_may_differ_from_job_to_job(target: FusedTarget) -> None:
    prompts = some_prompts(6, seed=3)
    jobs = [Job(prompt, 1 + 7 * at, tag=at) for at, prompt in enumerate(prompts)]
    for job in BatchDecoder(target, rows=8, stop_ids=()).run(jobs):
        assert job.output == plain(target, job.prompt, 1 + 7 * job.tag, ())


def test_an_answer_ends_where_the_context_does(target: FusedTarget) -> None:
    long = [9 + at % 100 for at in range(tiny.CONTEXT - 5)]
    got = answers(target, [long, long[:70]], 500, stop_ids=())
    assert [len(output) for output in got] == [5, tiny.CONTEXT - 70]
    assert got == [plain(target, long, 500, ()), plain(target, long[:70], 500, ())]


def test_no_jobs_are_no_waves(target: FusedTarget) -> None:
    before = target.layer_rows
    assert list(BatchDecoder(target, rows=4, stop_ids=EOS).run([])) == []
    assert target.layer_rows == before


@pytest.mark.parametrize(
    ("job", "error", "words"),
    [
        (Job([], 4), ContextError, "empty"),
        (Job([9] * tiny.CONTEXT, 4), ContextError, "no room"),
        (Job([9, tiny.VOCAB], 4), ContextError, "ids outside"),
        (Job([9], 0), OptionError, "max_new_tokens"),
        (Job([9], 4, -1.0), OptionError, "temperature"),
        (Job([9], 4, float("nan")), OptionError, "temperature"),
    ],
    ids=["empty", "full", "foreign", "nothing-wanted", "cold", "nan"],
)
def test_a_job_that_can_not_be_answered_is_refused_before_its_wave(
    target: FusedTarget, job: Job, error: type[Exception], words: str
) -> None:
    before = target.layer_rows
    with pytest.raises(error, match=words):
        list(BatchDecoder(target, rows=4, stop_ids=EOS).run([Job([9], 4), job]))
    assert target.layer_rows == before


def test_no_rows_are_refused(target: FusedTarget) -> None:
    with pytest.raises(OptionError, match="batch: "):
        BatchDecoder(target, rows=0, stop_ids=EOS)


@pytest.mark.parametrize("prompts", [[], [[]], [[9], [9, 9]]], ids=["none", "empty", "order"])
def test_a_batch_wants_its_prompts_longest_first(target: FusedTarget, prompts: Any) -> None:
    with pytest.raises(CacheStateError):
        FusedBatch(target).start(prompts, 4)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_model_that_gives_nan_is_told(temperature: float) -> None:
    model = random_model()
    model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ModelError, match="1 of 1 answers hold NaN"):
        list(
            BatchDecoder(fused(model, kernels="torch"), rows=4, stop_ids=()).run(
                [Job([9], 4, temperature)]
            )
        )


def test_what_an_earlier_wave_left_behind_is_never_seen(target: FusedTarget) -> None:
    decoder = BatchDecoder(target, rows=4, stop_ids=())
    prompts = some_prompts(4, seed=5)
    list(decoder.run([Job(prompt, 30) for prompt in prompts]))
    batch = decoder._batch
    with torch.inference_mode():
        for memory in [*batch._memory, batch._spare]:
            memory.fill_(torch.nan)
    got = [job.output for job in decoder.run([Job(prompts[0], 70)])]
    assert got == [plain(target, prompts[0], 70, ())]


def test_draws_follow_the_distribution_at_each_temperature() -> None:
    target = fused(random_model(vocab_size=16), kernels="torch")
    prompt, count, heats = [3, 5, 7], 1500, (0.6, 1.3)
    jobs = [Job(prompt, 2, heat) for _ in range(count) for heat in heats]
    list(BatchDecoder(target, rows=500, stop_ids=(), seed=4).run(jobs))
    for heat in heats:
        outputs = [job.output for job in jobs if job.temperature == heat]
        firsts = Counter(first for first, _ in outputs)
        likeliest = firsts.most_common(1)[0][0]
        seconds = Counter(second for first, second in outputs if first == likeliest)
        for seen, context in ((firsts, prompt), (seconds, [*prompt, likeliest])):
            assert p_value(seen, distribution(target, context, heat)) > 1e-3


def distribution(target: FusedTarget, context: Sequence[int], heat: float) -> torch.Tensor:
    sequence = target.open()
    logits = target.prefill(sequence, context).logits
    target.close(sequence)
    assert logits is not None
    return torch.softmax(logits[-1].double() / heat, -1)


def p_value(seen: Counter[int], probs: torch.Tensor) -> float:
    """Of Pearson's test; ids that are expected fewer than five times count as one."""
    expected = [float(p) * seen.total() for p in probs]
    rare = [token for token, e in enumerate(expected) if e < 5]
    common = [token for token, e in enumerate(expected) if e >= 5]
    pairs = [(seen[token], expected[token]) for token in common]
    rest = sum(expected[token] for token in rare)
    if rest > 0.5:
        pairs.append((sum(seen[token] for token in rare), rest))
    found, wanted = zip(*pairs, strict=True)
    scale = sum(found) / sum(wanted)
    return float(stats.chisquare(found, [scale * each for each in wanted]).pvalue)


def test_a_biased_draw_would_be_noticed() -> None:
    target = fused(random_model(vocab_size=16), kernels="torch")
    probs = distribution(target, [3, 5, 7], 1.3)
    drawn = torch.multinomial(distribution(target, [3, 5, 7], 1.0), 1500, replacement=True)
    assert p_value(Counter(drawn.tolist()), probs) < 1e-3


def test_a_seed_gives_the_same_draws_and_another_one_others(target: FusedTarget) -> None:
    prompts = some_prompts(5, seed=6)

    def drawn(seed: int) -> list[list[int]]:
        jobs = [Job(prompt, 12, 1.0) for prompt in prompts]
        list(BatchDecoder(target, rows=4, stop_ids=(), seed=seed).run(jobs))
        return [job.output for job in jobs]

    assert drawn(1) == drawn(1) != drawn(2)


def test_greedy_rows_beside_drawn_ones_stay_greedy(target: FusedTarget) -> None:
    prompts = some_prompts(8, seed=7)
    jobs = [Job(prompt, 20, float(at % 2)) for at, prompt in enumerate(prompts)]
    list(BatchDecoder(target, rows=8, stop_ids=EOS).run(jobs))
    for job in jobs[::2]:
        assert job.output == plain(target, job.prompt, 20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_rows_follow_the_target_closely(dtype: torch.dtype) -> None:
    target = fused(random_model(), dtype, kernels="torch")
    prompts = sorted(some_prompts(6, seed=8), key=len, reverse=True)
    batch = FusedBatch(target)
    got = [batch.start(prompts, 3)]
    tokens = torch.tensor([20, 30, 40, 50, 60, 70])
    got += [batch.step(tokens)]
    for row, prompt in enumerate(prompts):
        sequence = target.open()
        for logits, ids in zip(got, (prompt, [int(tokens[row])]), strict=True):
            want = target.prefill(sequence, ids).logits
            assert want is not None
            assert logits.dtype == want.dtype == dtype
            error = (logits[row] - want[-1]).float().abs().mean()
            assert float(error) < 0.05 * float(want.float().std())
        target.close(sequence)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen3", "yarn-rope"])
def test_on_a_gpu_each_row_is_plain_decoding_too(kind: str) -> None:
    target = fused(random_model(KINDS[kind]), device="cuda", kernels="torch")
    prompts = some_prompts(12)
    assert answers(target, prompts) == [plain(target, prompt, 40) for prompt in prompts]


def test_nothing_of_torchs_is_changed_between_answers(target: FusedTarget) -> None:
    state = torch.random.get_rng_state()
    for _ in BatchDecoder(target, rows=4, stop_ids=()).run([Job([9], 3, 0.5), Job([10], 5)]):
        assert not torch.is_inference_mode_enabled()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_allocator_is_told_to_keep_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, int] = {}

    class Library:
        class mallopt:  # glibc gives 1 when it takes an option
            def __new__(cls, option: int, value: int) -> Any:
                told[option] = value
                return 1

    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    assert keep_freed_memory() is True
    no_mapping, no_trimming, top_pad = -4, -1, -2
    assert told == {no_mapping: 0, no_trimming: -1, top_pad: 1 << 28}
    del Library.mallopt
    assert keep_freed_memory() is False


def test_another_platforms_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert keep_freed_memory() is False
