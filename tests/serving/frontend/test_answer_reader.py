"""Thoughts, content and calls in answers that come in pieces."""

import json

import pytest

from eqx_decoders.io.text.tool_calls import FunctionCall, tool_format
from eqx_decoders.serving.frontend.answer_reader import AnswerFormat, AnswerParts


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
CASES = {
    "text": (QWEN, "x", " A < b\n", AnswerParts(" A < b\n")),
    "thoughts": (QWEN, "x", "\n<think>\nHm < b.\n</think>\n\nYes \n", AnswerParts("Yes \n", "Hm < b.")),
    "thoughts of the prompt": (QWEN, "<think>\n", "Hm.</think> Yes", AnswerParts("Yes", "Hm.")),
    "thoughts that don't end": (QWEN, "x", "<think>Hm </thin", AnswerParts("", "Hm </thin")),
    "a call": (QWEN, "x", THINKS, AnswerParts("See:", "Hm. <tool_call>", (CALL,) * 2)),
    "a call that can't be read": (QWEN, "x", UNREAD, AnswerParts(UNREAD)),
    "a name that begins like a call": (QWEN, "x", "See <tool_c", AnswerParts("See <tool_c")),
    "Mistral": (MISTRAL, "x", f'[TOOL_CALLS] [{JSON[:-1]}, "id": "123456789"}}]', AnswerParts("", "", (CALL,))),
    "Llama 3": (LLAMA, "x", JSON.replace("arguments", "parameters"), AnswerParts("", "", (CALL,))),
    "Llama 3, other JSON": (LLAMA, "x", '{"a": 1}', AnswerParts('{"a": 1}')),
    "Llama 3, tagged": (LLAMA, "x", f"<|python_tag|>{JSON}", AnswerParts("", "", (CALL,))),
    "Qwen 3 Coder": ("<think><function=", "x", f"I see.\n{CODER}", AnswerParts("I see.", "", (CALL,))),
    "harmony": (HARMONY, "x", FINAL, AnswerParts("Yes <|en", "Hm <|.")),
    "harmony, a call": (HARMONY, "x", SAID + ASKS, AnswerParts("", "Hm <|.", (CALL,))),
    "harmony, two calls": (HARMONY, "x", f"{NEXT}{ASKS}<|call|>", AnswerParts("", "", (CALL,) * 2)),
    "harmony, arguments that can't be read": (HARMONY, "x", ASKS[:-1], AnswerParts(ARGUMENTS[:-1])),
    "harmony without a header": (HARMONY, "x", "Yes", AnswerParts("Yes")),
    "harmony, cut": (HARMONY, "x", f"{SAID}<|channel|>fi", AnswerParts("", "Hm <|.")),
}  # fmt: skip


def read(source, prompt, pieces, tools=TOOLS, special=False, form="auto"):
    names, form = ("<|im_end|>", "[TOOL_CALLS]"), tool_format(source) if form == "auto" else form
    reader = AnswerFormat(source, names, form).reader(tools, prompt, special=special)
    parts = [*map(reader.push, pieces), reader.flush()]
    assert not any(part.calls for part in parts[:-1])
    content, thoughts, _ = zip(*parts, strict=True)
    return AnswerParts("".join(content), "".join(thoughts), parts[-1].calls)


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_read_whole_and_in_pieces(name):
    source, prompt, text, want = CASES[name]
    for size in (len(text), 1, 2, 3, 5, 11):
        pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
        assert read(source, prompt, pieces) == want, size


def test_content_is_shown_as_it_comes():
    reader = AnswerFormat(QWEN, (), "hermes").reader(TOOLS, "x", special=False)
    pieces = ["<think>", "Hm", ".", "</think>", "\n\n", "Yes", " it", " ", "is", "<to", "p>"]
    parts = [reader.push(piece) for piece in pieces]
    assert [part.thoughts for part in parts] == ["", "Hm", ".", *[""] * 8]
    assert [part.content for part in parts] == [*[""] * 5, "Yes", " it", "", " is", "", "<top>"]


def test_names_of_other_special_tokens_are_left_out_unless_they_are_wanted():
    text = ["<think>", "Hm<|im_end|>", "</think>", "A", "<|im_end|>", "B"]
    assert read(QWEN, "x", text) == AnswerParts("AB", "Hm")
    assert read(QWEN, "x", text, special=True) == AnswerParts("A<|im_end|>B", "Hm<|im_end|>")


def test_without_tools_nothing_is_called():
    call = f"<tool_call>{JSON}</tool_call>"
    assert read(QWEN, "x", [call], tools=()) == AnswerParts(call)
    assert read(HARMONY, "x", [ASKS], tools=()) == AnswerParts(ARGUMENTS)
    assert read(QWEN, "x", ["<think>Hm.</think>", call], form=None) == AnswerParts(call, "Hm.")
    assert AnswerFormat("{{ messages }}", (), "hermes").reader((), "<think>", special=False) is None
    assert json.loads(ARGUMENTS) == CALL.arguments
