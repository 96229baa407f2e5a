"""`speculate` and streamers: every token once, in order, and one end."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch
import transformers as hf
from tests.plugins.transformers_cases import generate, knowing, learn, prompt
from tests.tiny_llm import make_model, make_tokenizer

from hasten.errors import OptionError
from hasten.plugins.transformers import speculate

__all__ = ["knowing"]


class Recorder:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.append((value.tolist(), value.dtype, value.device.type))

    def end(self) -> None:
        self.heard.append("end")


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def ids_of(tokenizer: Any, text: str) -> torch.Tensor:
    ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids
    return ids


@pytest.mark.parametrize("where", ["generate", "speculate", "both"])
def test_a_streamer_hears_what_it_hears_of_plain_generate(
    where: str, model: Any, knowing: Any
) -> None:
    plain, mine = Recorder(), Recorder()
    learn(model, prompt())
    generate(model, prompt(), streamer=plain)
    bound = {} if where == "generate" else {"streamer": mine}
    given = {} if where == "speculate" else {"streamer": mine}
    speculation = speculate("oracle", **bound)
    generate(model, prompt(), speculation, **given)
    assert mine.heard == plain.heard
    assert mine.heard[-1] == "end"
    assert speculation.statistics[0].mean_accepted_length > 2


def test_tokens_behind_an_end_are_not_streamed(model: Any, knowing: Any) -> None:
    end = int(generate(model, prompt())[0, 15])
    heard = Recorder()
    got = learn(model, prompt(), eos_token_id=end)
    generate(model, prompt(), speculate("oracle", streamer=heard), eos_token_id=end)
    tokens = [values[0] for values, *_ in heard.heard[1:-1]]
    assert tokens == got[0, 9:].tolist()


@pytest.mark.parametrize("skip_prompt", [True, False])
def test_a_text_streamer_prints_what_plain_generate_prints(
    skip_prompt: bool,
    model: Any,
    tokenizer: Any,
    knowing: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = ids_of(tokenizer, "tail recursion\n")
    learn(model, ids, max_new_tokens=60)
    printed = []
    for method in (None, "oracle", "flaky"):
        for bound in (True, False) if method else (False,):
            streamer = hf.TextStreamer(tokenizer, skip_prompt=skip_prompt)
            speculation = (
                speculate(method, streamer=streamer if bound else None) if method else None
            )
            given = {} if bound else {"streamer": streamer}
            generate(model, ids, speculation, max_new_tokens=60, **given)
            printed.append(capsys.readouterr().out)
    assert len(printed[0]) > 30
    assert len(set(printed)) == 1


@pytest.mark.parametrize("bound", [True, False])
def test_an_iterator_in_another_thread_gets_the_whole_text(
    bound: bool, model: Any, tokenizer: Any, knowing: Any
) -> None:
    ids = ids_of(tokenizer, "abcabc")
    plain = learn(model, ids, max_new_tokens=40)
    streamer = hf.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=120)
    speculation = speculate("oracle", streamer=streamer if bound else None)
    options = {"max_new_tokens": 40} | ({} if bound else {"streamer": streamer})
    thread = Thread(target=generate, args=(model, ids, speculation), kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(plain[0, ids.shape[1] :])


def test_tokens_come_before_the_answer_is_complete(model: Any, knowing: Any) -> None:
    learn(model, prompt())
    progress = []

    class Watching(Recorder):
        def put(self, value: torch.Tensor) -> None:
            progress.append(passes[0])

    passes = [0]

    def count(*_: Any) -> None:
        passes[0] += 1

    generate(model, prompt(), speculate("oracle"))  # the self-check's passes come here
    handle = model.get_input_embeddings().register_forward_pre_hook(count)
    generate(model, prompt(), speculate("oracle", streamer=Watching()))
    handle.remove()
    assert len(set(progress)) == passes[0] + 1  # the prompt, and the tokens of each pass


@pytest.fixture
def refused() -> Iterator[Recorder]:
    heard = Recorder()
    yield heard
    assert heard.heard.count("end") == 1
    assert heard.heard[-1] == "end"


@pytest.mark.parametrize("where", ["streamer", "speculate"])
def test_a_refused_call_ends_the_stream_too(where: str, model: Any, refused: Recorder) -> None:
    speculation = speculate("ar", streamer=refused if where == "speculate" else None)
    options = {} if where == "speculate" else {"streamer": refused}
    with pytest.raises(OptionError, match="dola_layers"):
        generate(model, prompt(), speculation, dola_layers="high", **options)


def test_an_error_on_the_way_ends_the_stream_once(model: Any, refused: Recorder) -> None:
    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 12:
            raise KeyError("mine")
        return scores

    with pytest.raises(KeyError, match="mine"):
        generate(model, prompt(), speculate("ar", streamer=refused), logits_processor=[fail])
    assert len(refused.heard) == 1 + 3 + 1


def test_a_streamer_that_fails_stops_the_answer(model: Any) -> None:
    class Broken(Recorder):
        def put(self, value: torch.Tensor) -> None:
            if len(self.heard) == 3:
                raise ConnectionError("gone")
            super().put(value)

    broken = Broken()
    with pytest.raises(ConnectionError):
        generate(model, prompt(), speculate("ar", streamer=broken))
    assert broken.heard[-1] == "end"
    generate(model, prompt(), speculate("ar"))  # the model is free again


def test_two_streamers_and_a_batch_are_refused(model: Any) -> None:
    one, two = Recorder(), Recorder()
    with pytest.raises(OptionError, match="streamer: generate has another than speculate"):
        generate(model, prompt(), speculate("ar", streamer=one), streamer=two)
    assert (one.heard[-1], two.heard[-1]) == ("end", "end")
    with pytest.raises(OptionError, match="streamer: can't tell the rows of a batch apart"):
        generate(model, prompt().repeat(2, 1), speculate("ar", streamer=one))


def test_a_wrapped_speculation_leaves_the_prompt_to_generate(model: Any) -> None:
    """What stands between hides the call; then both are given the streamer, as documented."""
    heard, plain = Recorder(), Recorder()
    wrapped = functools.partial(speculate("ar", streamer=heard))
    generate(model, prompt(), wrapped, streamer=heard)
    generate(model, prompt(), streamer=plain)
    assert heard.heard == plain.heard


def test_stop_strings_inside_a_block_cut_where_plain_generate_does(
    model: Any, tokenizer: Any, knowing: Any
) -> None:
    ids = ids_of(tokenizer, "abcabc")
    unreadable = [i for i in range(258) if not tokenizer.decode([i]).isascii()]
    options: dict[str, Any] = {"max_new_tokens": 40, "suppress_tokens": unreadable}
    answer = tokenizer.decode(learn(model, ids, **options)[0, ids.shape[1] :])
    for at in (2, 9, 17):
        strings = [answer[at : at + 2], answer[at + 5 : at + 7]]
        plain = generate(model, ids, stop_strings=strings, tokenizer=tokenizer, **options)
        stop = hf.StopStringCriteria(tokenizer, strings)
        got = generate(model, ids, speculate("oracle"), stopping_criteria=[stop], **options)
        assert torch.equal(got, plain)
        assert got.shape[1] < ids.shape[1] + 40
