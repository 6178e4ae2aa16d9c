"""Reader of answers from token ids: reasoning, content and tool calls, with stop strings and log-probs."""

import json
from pathlib import Path
from typing import Any

import pytest

from eqx_decoders.io.text.output_parsing.formats import FunctionCall, find_tool_format
from eqx_decoders.io.text.tokenizer import load_tokenizer
from eqx_decoders.serving.engine.request import RequestOutput
from eqx_decoders.serving.engine.sampler import TokenScore
from eqx_decoders.serving.frontend.completion_reader import create_reader
from eqx_decoders.serving.http.chat_protocol import ChatCompletionRequest
from eqx_decoders.serving.http.protocol import CompletionRequest
from eqx_decoders.serving.http.responses import Choice, CollectedDeltas


TOKENIZER: Any = load_tokenizer(Path(__file__).parents[2] / "fixtures" / "chats")
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"properties": {"what": {"type": "string"}}}}}]
CALL, ARGUMENTS = FunctionCall("find", {"what": "a <b>"}), '{"what": "a <b>"}'
JSON = f'{{"name": "find", "arguments": {ARGUMENTS}}}'
TWICE = f"<tool_call>\n{JSON}\n</tool_call>\n<tool_call>\n{JSON}\n</tool_call>"
QWEN, MISTRAL, LLAMA = "<think> <tool_call> <|im_end|>", "[TOOL_CALLS]", "ipython"
HARMONY = "<|start|>assistant<|channel|>analysis<|message|>"
CODER = "<tool_call>\n<function=find>\n<parameter=what>\na <b>\n</parameter>\n</function>\n</tool_call>"
UNREAD = "See: <tool_call>{</tool_call>"
THINKS = f"<think>Hm. <tool_call></think>See:\n{TWICE}"
SAID = "<|channel|>analysis<|message|>Hm <|.<|end|><|start|>assistant"
FINAL = f"{SAID}<|channel|>final<|message|>Yes <|en<|return|>"
ASKS = f" to=functions.find<|channel|>commentary json<|message|>{ARGUMENTS}"
NEXT = f"{ASKS}<|call|><|start|>assistant"
WORDS = "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>"
COHERE = "<|START_THINKING|> <|START_ACTION|> <|START_RESPONSE|>"
# chat template, end of the prompt, answer; then the reasoning, content and calls of this answer
CASES = {
    "text": (QWEN, "x", " A < b\n", "", " A < b\n", ()),
    "reasoning": (QWEN, "x", "\n<think>\nHm < b.\n</think>\n\nYes \n", "Hm < b.", "Yes \n", ()),
    "reasoning started by the prompt": (QWEN, "<think>\n", "Hm.</think> Yes", "Hm.", "Yes", ()),
    "reasoning started twice": (QWEN, "<think>\n", "<think>\nHm.</think> Yes", "Hm.", "Yes", ()),
    "reasoning ended by the prompt": (QWEN, "<think>\n\n</think>\n\n", "A </think> b", "", "A </think> b", ()),
    "no reasoning": (QWEN, "<think>\n", "</think>Yes", "", "Yes", ()),
    "unfinished reasoning": (QWEN, "x", "<think>Hm </thin", "Hm </thin", "", ()),
    "markers after the reasoning": (QWEN, "<think>", "a</think>b </think> <think>", "a", "b </think> <think>", ()),
    "Cohere": (COHERE, "x", f"{WORDS}Yes<|END_RESPONSE|>", "Hm", "Yes", ()),
    "a call": (QWEN, "x", THINKS, "Hm. <tool_call>", "See:", (CALL,) * 2),
    "a malformed call": (QWEN, "x", UNREAD, "", UNREAD, ()),
    "text that starts like a marker": (QWEN, "x", "See <tool_c", "", "See <tool_c", ()),
    "Mistral": (MISTRAL, "x", f'[TOOL_CALLS] [{JSON[:-1]}, "id": "123456789"}}]', "", "", (CALL,)),
    "Llama 3": (LLAMA, "x", JSON.replace("arguments", "parameters"), "", "", (CALL,)),
    "Llama 3, other JSON": (LLAMA, "x", '{"a": 1}', "", '{"a": 1}', ()),
    "Llama 3, tagged": (LLAMA, "x", f"<|python_tag|>{JSON}", "", "", (CALL,)),
    "Qwen 3 Coder": ("<think><function=", "x", f"I see.\n{CODER}", "", "I see.", (CALL,)),
    "harmony": (HARMONY, "x", FINAL, "Hm <|.", "Yes <|en", ()),
    "harmony, a channel in the prompt": (HARMONY, f"{HARMONY[:19]}<|channel|>final<|message|>", "Yes", "", "Yes", ()),
    "harmony, a call": (HARMONY, "x", SAID + ASKS, "Hm <|.", "", (CALL,)),
    "harmony, two calls": (HARMONY, "x", f"{NEXT}{ASKS}<|call|>", "", "", (CALL,) * 2),
    "harmony, unfinished arguments": (HARMONY, "x", ASKS[:-1], "", ARGUMENTS[:-1], ()),
    "harmony without a header": (HARMONY, "x", "Yes", "", "Yes", ()),
    "harmony, cut": (HARMONY, "x", f"{SAID}<|channel|>fi", "Hm <|.", "", ()),
}  # fmt: skip


def ids_of(text):
    return TOKENIZER.encode(text, special=True).tolist()


def read(source, prompt, ids, tools: Any = TOOLS, special=False, form: Any = "auto"):
    """Return the reasoning, the content and the calls of an answer."""
    form = find_tool_format(source) if form == "auto" else form
    reader = create_reader(TOKENIZER, source, form, tools, ids_of(prompt), special=special)
    if reader is None:
        return None
    parts = [*map(reader.push, ids), reader.flush()]
    reasoning, content, calls = "", "", []
    for part in parts:
        if part.was_reasoning:
            reasoning, content = reasoning + content, ""
        reasoning, content, calls = reasoning + part.reasoning, content + part.content, [*calls, *part.calls]
    return reasoning, content, tuple(calls)


@pytest.mark.parametrize("name", CASES)
def test_parts_of_an_answer(name):
    source, prompt, text, *parts = CASES[name]
    assert read(source, prompt, ids_of(text)) == tuple(parts)


def test_returns_content_incrementally():
    reader = create_reader(TOKENIZER, QWEN, "hermes", TOOLS, ids_of("x"), special=False)
    assert reader is not None
    pieces = ["<think>", "Hm", ".", "</think>", "\n\n", "Yes", " it", " ", "is", "<to", "p>"]
    parts = [[reader.push(token) for token in ids_of(piece)] for piece in pieces]
    assert ["".join(part.reasoning for part in row) for row in parts] == ["", "Hm", ".", *[""] * 8]
    assert ["".join(part.content for part in row) for row in parts] == [*[""] * 5, "Yes", " it", "", " is", "", "<top>"]


def test_distinguishes_special_tokens_from_their_names_in_text():
    end = ids_of("<|im_end|>")
    assert len(end) == 1
    ids = [*ids_of("<think>Hm"), *end, *ids_of("</think>A"), *end, *ids_of("B")]
    assert read(QWEN, "x", ids) == ("Hm", "AB", ())
    assert read(QWEN, "x", ids, special=True) == ("Hm<|im_end|>", "A<|im_end|>B", ())
    ids = TOKENIZER.encode("<think>a <|im_end|></think>b <|im_end|> c").tolist()  # as text
    assert read(QWEN, "x", ids) == ("a <|im_end|>", "b <|im_end|> c", ())
    said = ids_of("<|channel|>final<|message|>") + TOKENIZER.encode("a <|end|><|channel|> b").tolist()
    assert read(HARMONY, "x", said) == ("", "a <|end|><|channel|> b", ())
    text = "see [TOOL_CALLS] here"
    call = (
        ids_of("[TOOL_CALLS]") + TOKENIZER.encode(json.dumps([{"name": "find", "arguments": {"what": text}}])).tolist()
    )
    assert read(MISTRAL, "x", call) == ("", "", (FunctionCall("find", {"what": text}),))
    assert read(MISTRAL, "x", TOKENIZER.encode(text).tolist()) == ("", text, ())


def test_calls_are_content_without_tools():
    call = f"<tool_call>{JSON}</tool_call>"
    assert read(QWEN, "x", ids_of(call), tools=()) == ("", call, ())
    assert read(HARMONY, "x", ids_of(ASKS), tools=()) == ("", ARGUMENTS, ())
    assert read(QWEN, "x", ids_of(f"<think>Hm.</think>{call}"), form=None) == ("Hm.", call, ())
    assert read("{{ messages }}", "<think>", [], tools=(), form="hermes") is None


# --- stop strings and log-probs ---------------------------------------------------------------------------------------


def choice_of(source, prompt, tools=TOOLS, **fields: Any):
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], **fields)
    special = not request.skip_special_tokens
    form = find_tool_format(source)
    return Choice(
        request, TOKENIZER, reader=create_reader(TOKENIZER, source, form, tools, ids_of(prompt), special=special)
    )


def take(choice, ids, size=1, end: Any = "length"):
    """Return the complete answer and its deltas. `size`: tokens per output of the engine."""
    collected, deltas = CollectedDeltas(), []
    for begin in range(0, len(ids), size):
        piece, last = ids[begin : begin + size], begin + size >= len(ids)
        scores = tuple(TokenScore(token, -1.0) for token in piece)
        reason = end if last else None
        output = RequestOutput(request_id=0, tokens=tuple(piece), scores=scores, finish_reason=reason)
        deltas.append(choice.take(output))
        collected.add(deltas[-1])
        if choice.finished:
            break
    return collected.join(), deltas


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stop", [(), ("Yes",), ("m",), ("</",), ("\n",), ('"what"',)])
def test_stream_and_complete_answer_have_the_same_parts(name, stop):
    source, prompt, text, *_ = CASES[name]
    for fields in ({}, {"min_tokens": 5}, {"include_stop_str_in_output": True}, {"skip_special_tokens": False}):
        results = []
        for size in (1, 3, 1000):
            choice = choice_of(source, prompt, stop=stop, **fields)
            whole, deltas = take(choice, ids_of(text), size)
            assert "".join(delta.text for delta in deltas) == whole.text
            assert "".join(delta.reasoning for delta in deltas) == whole.reasoning
            numbers = [delta.first_call + at for delta in deltas for at in range(len(delta.calls))]
            assert numbers == [*range(len(whole.calls))]
            results.append((whole.text, whole.reasoning, whole.calls, whole.finish, whole.reason, whole.has_called))
        assert results[0] == results[1] == results[2]


def test_stop_strings_and_stop_tokens_do_not_cut_the_reasoning():
    text = "The Question: 4 is easy.\n</think>\n\nThe answer is 4.\n\nQuestion: next"
    for prompt, answer in (("<think>\n", text), ("x", f"<think>{text}")):
        whole, _ = take(choice_of(QWEN, prompt, stop=("Question:",)), ids_of(answer))
        assert (whole.reasoning, whole.text) == ("The Question: 4 is easy.", "The answer is 4.\n\n")
        assert (whole.finish, whole.reason) == ("stop", "Question:")
        (token,) = ids_of("4")
        choice = choice_of(QWEN, prompt, stop_token_ids=[token])
        whole, _ = take(choice, ids_of(answer))
        assert (whole.reasoning, whole.text, whole.reason) == ("The Question: 4 is easy.", "The answer is ", token)
        assert choice.engine_stop_ids == ()
    assert choice_of("messages", "x", tools=(), stop_token_ids=(5,)).engine_stop_ids == (5,)
    harmony = "<|channel|>analysis<|message|>a b<|end|><|start|>assistant<|channel|>final<|message|>c b d"
    whole, _ = take(choice_of(HARMONY, "<|start|>assistant", stop=("b",)), ids_of(harmony))
    assert (whole.reasoning, whole.text, whole.finish) == ("a b", "c ", "stop")
    call = f"<think>a</think><tool_call>{JSON}</tool_call>"
    whole, _ = take(choice_of(QWEN, "x", stop=("find", "</tool_call>")), ids_of(call))
    assert (whole.calls, whole.finish) == ([CALL], "length")


def test_stop_string_that_is_a_special_token_matches_by_id():
    name, ids = "<|user|>", ids_of("ab<|user|>c")
    for source in (QWEN, HARMONY, "messages"):
        for fields in ({}, {"skip_special_tokens": False}, {"include_stop_str_in_output": True}):
            whole, _ = take(choice_of(source, "x", tools=(), stop=(name,), **fields), ids)
            assert (whole.text.removesuffix(name), whole.finish, whole.reason) == ("ab", "stop", name)
        whole, _ = take(choice_of(source, "x", tools=(), stop=(name,), min_tokens=4), ids)
        assert (whole.text, whole.finish) == ("abc", "length")
        whole, _ = take(choice_of(source, "x", stop=(name,)), ids_of(name))
        assert (whole.text, whole.finish) == ("", "stop")
    whole, _ = take(choice_of(QWEN, "<think>", stop=(name,)), ids_of("a<|user|>b</think>c<|user|>d"))
    assert (whole.reasoning, whole.text, whole.finish) == ("ab", "c", "stop")
    completion = Choice(CompletionRequest(prompt="x", stop=name), TOKENIZER)
    whole, _ = take(completion, ids)
    assert (whole.text, whole.finish, whole.reason) == ("ab", "stop", name)


def test_log_probs_cover_the_content():
    answer = "<think>Hm.</think>Yes"
    for prompt, text in (("x", answer), ("<think>", answer.removeprefix("<think>")), ("x", "Yes")):
        for size in (1, 3, 100):
            whole, _ = take(choice_of(QWEN, prompt, logprobs=True), ids_of(text), size)
            assert TOKENIZER.decode(whole.scored) == whole.text == "Yes"
            whole, _ = take(choice_of(QWEN, prompt, logprobs=True, return_token_ids=True), ids_of(text), size)
            assert whole.scored == whole.tokens == ids_of(text)  # one score per token


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (QWEN, "\n<think>\nHm.\n</think>\n\nYes"),
        (HARMONY, f"{SAID}<|channel|>final<|message|>Yes"),
        (HARMONY, "<|channel|>final<|message|>Y<|end|><|start|>assistant<|channel|>final<|message|>es"),
        (HARMONY, "Yes"),
    ],
    ids=["qwen", "harmony", "two finals", "no channel"],
)
def test_log_probs_omit_markers_and_blanks_between_the_parts(source, text):
    for size in (1, 3, 100):
        whole, _ = take(choice_of(source, "x", tools=(), logprobs=True), ids_of(text), size)
        assert TOKENIZER.decode(whole.scored, special=True) == whole.text == "Yes"


def test_content_before_an_unopened_end_marker_is_reasoning():
    whole, deltas = take(choice_of(QWEN, "x"), ids_of("plan \n</think>\nYes"))
    assert (whole.reasoning, whole.text) == ("plan", "Yes")
    assert any(delta.was_reasoning for delta in deltas)


def test_discards_calls_and_log_probs_before_an_unopened_end_marker():
    call = f"I could <tool_call>{JSON}</tool_call> but no.</think>Yes"
    for size in (1, 3, 1000):
        whole, _ = take(choice_of(QWEN, "x", logprobs=True), ids_of(call), size)
        assert (whole.text, whole.calls, whole.has_called) == ("Yes", [], False)
        assert TOKENIZER.decode(whole.scored) == "Yes"
        whole, _ = take(choice_of(QWEN, "x", logprobs=True, return_token_ids=True), ids_of(call), size)
        assert whole.scored == whole.tokens == ids_of(call)


@pytest.mark.parametrize(
    ("source", "text", "arguments"),
    [
        (LLAMA, '{"name": "find", "parameters": {"what": "Par', '{"what": "Par'),
        ("<|python_start|>", "[find(what='a', n=", '{"what": "a"}'),
    ],
    ids=["llama", "python"],
)
def test_returns_a_required_call_without_a_marker_that_is_cut_off(source, text, arguments):
    form: Any = find_tool_format(source)
    for must_call in (True, False):
        reader: Any = create_reader(TOKENIZER, source, form, TOOLS, ids_of("x"), special=False, must_call=must_call)
        parts = [*map(reader.push, ids_of(text)), reader.flush()]
        calls = [call for part in parts for call in part.calls]
        content = "".join(part.content for part in parts)
        assert (calls, content) == (([("find", arguments)], "") if must_call else ([], text))
