"""The bodies of ``/v1/chat/completions`` and ``/v1/completions`` -> `Request`, or a 400."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hasten.serve.faults import ApiError, bad
from hasten.serve.fields import Fields, shown
from hasten.types import SamplingParams

Prompt = str | list[int] | list[dict[str, str]]

COMPLETION_TOKENS = 16
"""OpenAI's default length of ``/v1/completions``; a chat answer may fill the context."""
LONGEST = 2**31 - 1
"""No answer is longer; its true limit is set once the prompt's length is known."""
_MOST_STOPS, _LONGEST_STOP = 4, 1_000
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """What an answer is held to: a function of `hasten.grammar` and its text or schema."""

    kind: str
    value: Any = None


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request.

    prompts        chat: one list of messages; completions: texts or ids
    max_tokens     None: as many as there is room for
    params         all sampling options but the length and the grammar
    include_usage  a last chunk of a stream says what was used
    marks          stream chunks say which tokens were drafted
    """

    chat: bool
    model: str | None
    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: int | None
    params: SamplingParams
    grammar: GrammarRequest | None
    method: str | None
    verify: str | None
    cache_key: str | None
    stream: bool
    include_usage: bool
    marks: bool


def read_chat(body: dict[str, Any]) -> Request:
    """A body of ``/v1/chat/completions``. Raises ApiError or OptionError."""
    fields = Fields(body)
    messages = fields.take("messages", list)
    if not messages:
        raise bad("messages", "must be a list with at least one message")
    prompt = [_message(each, f"messages[{i}]") for i, each in enumerate(messages)]
    logprobs = fields.take("logprobs", bool)
    top = fields.whole("top_logprobs", 0, 20)
    if top is not None and not logprobs:
        raise bad("top_logprobs", "needs logprobs: true")
    longest = fields.whole("max_completion_tokens", 1)
    older = fields.whole("max_tokens", 1)
    if None not in (longest, older) and longest != older:
        raise bad("max_tokens", "says something else than max_completion_tokens. Give one")
    grammar = _response_format(fields.take("response_format", dict))
    for name, allowed, why in _CHAT_ONLY:
        fields.only(name, allowed, why)
    return _read(
        fields,
        chat=True,
        prompts=(prompt,),
        logprobs=(top or 0) if logprobs else None,
        max_tokens=older if longest is None else longest,
        grammar=grammar,
    )


def read_completion(body: dict[str, Any]) -> Request:
    """A body of ``/v1/completions``. Raises ApiError or OptionError."""
    fields = Fields(body)
    prompts = _prompts(fields.take("prompt"))
    logprobs = fields.whole("logprobs", 0, 20)
    max_tokens = fields.whole("max_tokens", 1)
    grammar = _response_format(fields.take("response_format", dict))
    fields.only("echo", (False,), "the prompt isn't repeated by this server")
    fields.only("suffix", ("",), "text can't be put in between here")
    fields.only("best_of", (1, body.get("n")), "answers aren't ranked here: use n")
    return _read(
        fields,
        chat=False,
        prompts=prompts,
        logprobs=logprobs,
        max_tokens=COMPLETION_TOKENS if max_tokens is None else max_tokens,
        grammar=grammar,
    )


_NO_TOOLS = "tools can't be called here"
_CHAT_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("tools", ([],), _NO_TOOLS),
    ("tool_choice", ("none", "auto"), _NO_TOOLS),
    ("parallel_tool_calls", (True, False), _NO_TOOLS),
    ("functions", ([],), _NO_TOOLS),
    ("function_call", ("none", "auto"), _NO_TOOLS),
    ("modalities", (["text"],), "answers are text only"),
    ("audio", (), "answers are text only"),
    ("web_search_options", (), "there is no web search here"),
    ("prediction", (), "drafts come from the server's method"),
    ("reasoning_effort", (), "there is no such switch here"),
    ("verbosity", (), "there is no such switch here"),
)
"""Fields of OpenAI's that only may say what happens anyway."""


def _read(
    fields: Fields,
    *,
    chat: bool,
    prompts: tuple[Prompt, ...],
    logprobs: int | None,
    max_tokens: int | None,
    grammar: GrammarRequest | None,
) -> Request:
    """What both routes have in common."""
    stream = bool(fields.take("stream", bool))
    extras = Fields(fields.take("hasten", dict) or {}, "hasten.")
    marks = bool(extras.take("marks", bool))
    extras.close()
    request = Request(
        chat=chat,
        model=fields.take("model", str),
        prompts=prompts,
        n=fields.whole("n", 1, 128) or 1,
        max_tokens=max_tokens,
        params=_sampling(fields, logprobs),
        grammar=grammar,
        method=fields.take("method", str),
        verify=fields.take("verify", str),
        cache_key=fields.take("prompt_cache_key", str),
        stream=stream,
        include_usage=_include_usage(fields.take("stream_options", dict), stream),
        marks=marks,
    )
    for name in ("user", "safety_identifier"):
        fields.take(name, str)
    fields.take("metadata", dict)
    fields.only("store", (False,), "nothing is stored here")
    fields.only("service_tier", ("auto", "default"), "there is one tier")
    fields.close()
    _check_together(request)
    return request


def _check_together(request: Request) -> None:
    params = request.params
    if request.max_tokens is not None and params.min_new_tokens > request.max_tokens:
        raise bad("min_tokens", f"{params.min_new_tokens} is more than max_tokens")
    if request.marks and not request.stream:
        raise bad("hasten.marks", "needs stream: true")
    if request.grammar is not None:
        for name, given in (
            ("min_tokens", params.min_new_tokens > 0),
            ("ignore_eos", params.ignore_eos),
        ):
            if given:
                raise bad(name, "contradicts response_format, which says where the answer ends")


def _include_usage(given: dict[str, Any] | None, stream: bool) -> bool:
    if given is None:
        return False
    if not stream:
        raise bad("stream_options", "needs stream: true")
    options = Fields(given, "stream_options.")
    wanted = bool(options.take("include_usage", bool))
    options.only("include_obfuscation", (False,), "chunks aren't padded here")
    options.close()
    return wanted


# -- prompts ---------------------------------------------------------------------------------------


def _message(given: Any, at: str) -> dict[str, str]:
    if not isinstance(given, dict):
        raise bad(at, f"must be an object, got {shown(given)}")
    fields = Fields(given, f"{at}.")
    role = fields.take("role", str)
    if role not in _ROLES:
        raise bad(f"{at}.role", f"must be one of {', '.join(_ROLES)}, got {shown(role)}")
    content = _content(fields.take("content"), f"{at}.content")
    fields.only("name", (), "this model's chat template has no names")
    for name in ("tool_calls", "function_call", "tool_call_id"):
        fields.only(name, ([],), _NO_TOOLS)
    for name in ("refusal", "audio", "annotations", "reasoning_content"):  # as answers have them
        fields.only(name, ([],), "only text can be sent")
    fields.close()
    return {"role": _ROLES[role], "content": content}


def _content(given: Any, at: str) -> str:
    """A message's text: a string, or a list of text parts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise bad(at, f"must be text or a list of text parts, got {shown(given)}")
    texts = []
    for index, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise bad(
                f"{at}[{index}]",
                f'only {{"type": "text", "text": ...}} can be read, got {shown(kind)}',
            )
        texts.append(part["text"])
    return "".join(texts)


def _prompts(given: Any) -> tuple[Prompt, ...]:
    """A completion's prompts: text, a list of texts, ids, or a list of lists of ids."""
    if isinstance(given, str):
        prompts: list[Any] = [given]
    elif isinstance(given, list) and given and all(_is_id(each) for each in given):
        prompts = [given]
    elif isinstance(given, list):
        prompts = given
    else:
        prompts = []
    for each in prompts:
        ids = isinstance(each, list) and each and all(_is_id(i) for i in each)
        if not (ids or (isinstance(each, str) and each)):
            raise bad("prompt", f"each must be some text, or some ids, got {shown(each)}")
    if not prompts:
        raise bad("prompt", "must be text, a list of texts, ids, or a list of lists of ids")
    return tuple(prompts)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# -- options ---------------------------------------------------------------------------------------


def _sampling(fields: Fields, logprobs: int | None) -> SamplingParams:
    temperature, top_p = fields.number("temperature", 0.0), fields.number("top_p", 0.0, 1.0)
    given = {
        # OpenAI's default, not the library's
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": top_p,
        "top_k": _top_k(fields),
        "min_p": fields.number("min_p", 0.0, 1.0),
        "repetition_penalty": fields.number("repetition_penalty", 0.0),
        "presence_penalty": fields.number("presence_penalty", -2.0, 2.0),
        "frequency_penalty": fields.number("frequency_penalty", -2.0, 2.0),
        "logit_bias": _logit_bias(fields.take("logit_bias", dict)),
        "min_new_tokens": fields.whole("min_tokens", 0, LONGEST),
        "stop": _stop(fields.take("stop")),
        "ignore_eos": fields.take("ignore_eos", bool),
        "seed": fields.whole("seed", -(2**63)),
        "logprobs": logprobs,
    }
    said = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(max_new_tokens=LONGEST, **said)


def _top_k(fields: Fields) -> int | None:
    value = fields.whole("top_k", -1)
    return 0 if value == -1 else value  # vLLM's way to say off


def _stop(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    stops: Sequence[Any] = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS:
        raise bad("stop", f"must be text or a list of up to {_MOST_STOPS} texts")
    if not all(isinstance(each, str) and 0 < len(each) <= _LONGEST_STOP for each in stops):
        raise bad("stop", f"each must be 1 to {_LONGEST_STOP} characters of text")
    return tuple(stops)


def _logit_bias(given: dict[str, Any] | None) -> dict[int, float] | None:
    if given is None:
        return None
    bias = {}
    fields = Fields(given, "logit_bias.")
    for key in given:
        value = fields.number(key, -100, 100)
        if not (key.isascii() and key.isdigit() and len(key) < 10) or value is None:
            raise bad("logit_bias", f"maps token ids to numbers in [-100, 100], got {shown(key)}")
        if int(key) in bias:
            raise bad("logit_bias", f"names token {int(key)} twice")
        bias[int(key)] = value
    return bias


def _response_format(given: dict[str, Any] | None) -> GrammarRequest | None:
    if given is None:
        return None
    fields = Fields(given, "response_format.")
    kind = fields.take("type", str)
    if kind not in ("text", "json_object", "json_schema", "regex", "grammar"):
        raise ApiError(
            400,
            f"response_format.type: must be text, json_object, json_schema, regex or grammar, "
            f"got {shown(kind)}",
            param="response_format",
        )
    value = None
    if kind == "json_schema":
        value = _schema(fields.take("json_schema", dict))
    elif kind in ("regex", "grammar"):
        value = fields.take(kind, str)
        if not value:
            raise bad(f"response_format.{kind}", "must be some text")
    fields.close()
    names = {"grammar": "ebnf"}
    return None if kind == "text" else GrammarRequest(names.get(kind, kind), value)


def _schema(given: dict[str, Any] | None) -> Any:
    fields = Fields(given or {}, "response_format.json_schema.")
    schema = fields.take("schema", dict)
    if schema is None:
        raise bad("response_format.json_schema.schema", "must be a JSON Schema")
    for name in ("name", "description"):
        fields.take(name, str)
    fields.take("strict", bool)
    fields.close()
    return schema
