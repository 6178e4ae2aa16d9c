"""Token masks of constrained answers: special tokens in literals, reasoning, and tool calls."""

import asyncio
import json
import random
import time
from typing import Any

import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.io.text.output_parsing.formats import TOOL_CALL_FORMATS, FunctionCall
from eqx_decoders.io.text.tokenizer import JsonTokenizer
from eqx_decoders.io.text.tool_calls import parse_tool_calls
from eqx_decoders.serving.frontend.completion_grammar import (
    MARKERS,
    CallGrammar,
    CompletionGrammar,
    Grammar,
    ReasoningGrammar,
    call_grammar,
    chat_grammar,
    with_token_ids,
)
from eqx_decoders.serving.frontend.schema_reader import SchemaReader
from eqx_decoders.serving.frontend.structured_output import GrammarCompiler, reserved_tokens
from tests.errors import refused
from tests.serving.fake_engine import allowed_tokens


SPECIAL = ("<|end|>", "<|user|>", "<s>", "<|im_end|>", "<b>", "▁x")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # as in Qwen3, no special tokens


def tokenizer(special=SPECIAL, added=ADDED, byte_level: bool = True) -> JsonTokenizer:
    """Return a tokenizer of bytes and a few words, with special tokens and other added tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if byte_level:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {word: index for index, word in enumerate([*alphabet, "an", "<|", "|>", '{"'])}
        model = models.BPE(vocab, [("a", "n"), ("<", "|"), ("|", ">"), ("{", '"')])
        inner: Any = Tokenizer(model)
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.decoder = decoders.ByteLevel()
    else:
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127)), "▁", "▁a", "an"]
        inner = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, True))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    inner.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    return JsonTokenizer(inner, eos=special[0])


TOKENIZERS = {"bytes": tokenizer(), "unigram": tokenizer(byte_level=False)}
COMPILERS = {
    name: GrammarCompiler(words, words.vocab_size + 5, [words.eos_id or 0, words.vocab_size - len(ADDED) - 3])
    for name, words in TOKENIZERS.items()
}
PLAIN = tokenizer(special=("<eos>", "<|user|>", "<b>"), added=())  # has no tokens for markers
PLAIN_COMPILER = GrammarCompiler(PLAIN, PLAIN.vocab_size, [PLAIN.eos_id or 0])


def names(compiler: GrammarCompiler) -> dict[str, int]:
    inner = json.loads(compiler._tokenizer.to_json())
    return {token["content"]: token["id"] for token in inner["added_tokens"]}


def prepare(compiler: GrammarCompiler, grammar, max_tokens: int | None = None):
    (constraint,) = asyncio.run(compiler.prepare(grammar, 1, max_tokens=max_tokens))
    return constraint


def sample(compiler: GrammarCompiler, grammar, seed: int, *, length: int = 300, max_tokens: int | None = None):
    """Sample allowed tokens. Returns their ids without the stop id, and whether the answer has ended."""
    constraint, pick, ids = prepare(compiler, grammar, max_tokens), random.Random(seed), list[int]()
    for _ in range(length):
        tokens = allowed_tokens(constraint, compiler._vocab_size)
        assert tokens and not constraint.error
        stops = [token for token in tokens if token in compiler._stop_ids]
        token = pick.choice(stops or tokens)
        if token in compiler._stop_ids:
            return ids, True
        constraint.accept(token)
        ids.append(token)
    return ids, False


def text_of(compiler: GrammarCompiler, ids) -> str:
    return compiler._tokenizer.decode(ids, special=True)


def accepts(compiler: GrammarCompiler, grammar, *pieces: str | int) -> bool:
    """Return whether a grammar accepts the pieces as a complete answer. Text is tokenized without added tokens."""
    constraint = prepare(compiler, grammar)
    for piece in pieces:
        for token in [piece] if isinstance(piece, int) else compiler._vocabulary.tokenize_str(piece):
            if token not in allowed_tokens(constraint, compiler._vocab_size) or token in compiler._stop_ids:
                return False
            constraint.accept(token)
    return set(compiler._stop_ids) <= set(allowed_tokens(constraint, compiler._vocab_size))


# --- literals with the names of special tokens ------------------------------------------------------------------------


def escaped(text: str) -> str:
    return "".join("\\" + char if char in "|{}()[].*+?\\^$" else char for char in text)


def constraints_of_all_kinds(text: str) -> dict[str, tuple[Grammar, str]]:
    """Return constraints of all kinds that allow only one text, each with the expected answer."""
    record = {"type": "object", "properties": {"a": {"const": text}}, "required": ["a"], "additionalProperties": False}
    in_json = json.dumps(text, ensure_ascii=False)
    return {
        "choice": (Grammar("choice", (text,)), text),
        "regex": (Grammar("regex", escaped(text)), text),
        "grammar": (Grammar("grammar", f"start: {in_json}"), text),
        "enum": (Grammar("json", json.dumps({"enum": [text]})), in_json),
        "const": (Grammar("json", json.dumps({"const": text})), in_json),
        "pattern": (Grammar("json", json.dumps({"type": "string", "pattern": f"^{escaped(text)}$"})), in_json),
        "property": (Grammar("json", json.dumps(record)), json.dumps({"a": text}, ensure_ascii=False)),
        "key": (
            Grammar("json", json.dumps({**record, "properties": {text: {"const": 1}}, "required": [text]})),
            json.dumps({text: 1}, ensure_ascii=False),
        ),
    }


@pytest.mark.parametrize("name", [*SPECIAL, *ADDED])
@pytest.mark.parametrize("kind", COMPILERS)
def test_names_of_special_tokens_in_literals_are_ordinary_text(kind, name):
    compiler = COMPILERS[kind]
    added = set(names(compiler).values())
    for text in (name, f"plan{name}more", f"{name}{name}", f" {name} é"):
        for form, (grammar, right) in constraints_of_all_kinds(text).items():
            for wrapped in (grammar, CompletionGrammar(grammar)):
                ids, ended = sample(compiler, wrapped, 0)
                written = text_of(compiler, ids)
                if form in ("property", "key"):
                    written = json.dumps(json.loads(written), ensure_ascii=False)
                assert ended and written == right, (form, written)
                assert not added & set(ids), form


@pytest.mark.parametrize("kind", COMPILERS)
def test_stop_ids_are_allowed_only_at_the_end_of_a_literal(kind):
    compiler = COMPILERS[kind]
    for form, (grammar, _) in constraints_of_all_kinds("a<|end|>b<|im_end|>c").items():
        constraint = prepare(compiler, grammar)
        count = 0
        while not set(tokens := allowed_tokens(constraint, compiler._vocab_size)) & set(compiler._stop_ids):
            constraint.accept(tokens[-1])
            count += 1
        assert count > 12 and set(tokens) == set(compiler._stop_ids), form


def test_names_of_stop_tokens_in_literals_are_ordinary_text():
    compiler = GrammarCompiler(
        TOKENIZERS["bytes"], TOKENIZERS["bytes"].vocab_size, [names(COMPILERS["bytes"])["</think>"]]
    )
    for form, (grammar, right) in constraints_of_all_kinds("a</think>b").items():
        ids, ended = sample(compiler, grammar, 0)
        assert ended and json.dumps(text_of(compiler, ids)).count("</think>") == right.count("</think>"), form


def test_lark_grammars_may_contain_special_tokens():
    compiler = COMPILERS["bytes"]
    control = names(compiler)
    grammar = Grammar("grammar", 'start: "<b>" <|user|> /<s>+/ // <s>\n')
    ids, ended = sample(compiler, grammar, 0)
    assert ended and control["<|user|>"] in ids and {control["<b>"], control["<s>"]}.isdisjoint(ids)
    lark = 'start: "a<b>" <b> /<b>/ <[5]> // <b>\n| "\\"<b>" <other>'
    assert with_token_ids(lark, {"<b>": 7}) == 'start: "a<b>" <[7]> /<b>/ <[5]> // <b>\n| "\\"<b>" <other>'


def test_unterminated_literals_are_read_in_linear_time():
    start = time.process_time()
    for lark in ('"' + '\\"' * 100_000, "/" + "\\/" * 100_000):
        assert with_token_ids(lark, {"<b>": 7}) == lark
    assert time.process_time() - start < 2


# --- reasoning --------------------------------------------------------------------------------------------------------


ANSWER = Grammar("json", json.dumps({"enum": [{"a": 1}, {"a": 2}]}))
TEMPLATE = "{{ messages }}<think>{{ reasoning }}</think>"


def test_end_of_prompt_determines_reasoning():
    opened, closed = (
        chat_grammar(TEMPLATE, "x<think>\n", ANSWER, None),
        chat_grammar(TEMPLATE, "</think>\n\n", ANSWER, None),
    )
    free, without = chat_grammar(TEMPLATE, "assistant\n", ANSWER, None), chat_grammar("{{ x }}", "a", ANSWER, None)
    assert isinstance(opened, CompletionGrammar) and opened.reasoning == ReasoningGrammar("<think>", "</think>", True)
    assert isinstance(free, CompletionGrammar) and free.reasoning == ReasoningGrammar("<think>", "</think>", False)
    assert isinstance(closed, CompletionGrammar) and closed.reasoning is None and without is ANSWER
    assert chat_grammar(TEMPLATE, "", None, None) is None


@pytest.mark.parametrize("compiler", [COMPILERS["bytes"], PLAIN_COMPILER], ids=["tokens", "text"])
def test_format_constrains_the_answer_after_the_reasoning(compiler):
    control = names(compiler)
    begin, end = (control.get(name, name) for name in ("<think>", "</think>"))
    for opened in (False, True):
        grammar = CompletionGrammar(ANSWER, None, ReasoningGrammar("<think>", "</think>", opened))
        head = [] if opened else [begin]
        for whitespace in ("", "\n", "\n\n"):
            assert accepts(compiler, grammar, *head, 'why {"a": 3} <b>', end, f'{whitespace}{{"a": 1}}')
        assert accepts(compiler, grammar, *head, end, '{"a": 2}')
        assert accepts(compiler, grammar, '{"a": 1}') is not opened
        assert not accepts(compiler, grammar, *head, "why", end, '{"a": 3}')
        assert not accepts(compiler, grammar, *head, "why")  # an answer must follow
        assert not accepts(compiler, grammar, *head, '{"a": 1}', end)
        assert not accepts(compiler, grammar, *head, control["<|user|>"], end, '{"a": 1}')


@pytest.mark.parametrize("compiler", [COMPILERS["bytes"], PLAIN_COMPILER], ids=["tokens", "text"])
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("max_tokens", [20, 60, 200])
def test_reasoning_leaves_room_for_the_answer(compiler, opened, max_tokens):
    grammar = CompletionGrammar(Grammar("choice", ("yes", "no")), None, ReasoningGrammar("<think>", "</think>", opened))
    for seed in range(12):
        ids, ended = sample(compiler, grammar, seed, length=max_tokens, max_tokens=max_tokens)
        text = text_of(compiler, ids)
        assert ended and text.rpartition("</think>")[2].strip() in ("yes", "no"), text
        reasoning = text.partition("</think>")[0] if "</think>" in text else ""
        assert len(compiler._tokenizer.encode(reasoning)) <= max_tokens - reserved_tokens(max_tokens) + len("<think>")


def test_choices_with_reasoning_markers_are_complete_outputs():
    reasoning = ReasoningGrammar("<think>", "</think>", True)
    spelled = CompletionGrammar(Grammar("choice", ("a</think>b",)), None, reasoning)
    assert accepts(PLAIN_COMPILER, spelled, "a</think>b") and not accepts(
        PLAIN_COMPILER, spelled, "why</think>a</think>b"
    )
    end = names(COMPILERS["bytes"])["</think>"]
    assert accepts(COMPILERS["bytes"], spelled, "why", end, "a</think>b")  # the marker is a token


def test_choice_of_a_single_text_has_no_optional_reasoning():
    reasoning = ReasoningGrammar("<think>", "</think>", False)
    single = CompletionGrammar(Grammar("choice", ("yes",)), None, reasoning)
    assert accepts(PLAIN_COMPILER, single, "yes") and not accepts(PLAIN_COMPILER, single, "<think>a</think>yes")


def test_wrappers_of_an_answer_are_optional():
    grammar = CompletionGrammar(ANSWER, wrappers=(("<answer>", "</answer>"),))
    assert accepts(PLAIN_COMPILER, grammar, '{"a": 1}')
    assert accepts(PLAIN_COMPILER, grammar, '<answer>\n{"a": 1}\n</answer>')
    assert not accepts(PLAIN_COMPILER, grammar, '<answer>\n{"a": 1}')


def test_format_constrains_the_final_message_of_gpt_oss():
    grammar = chat_grammar("<|channel|><|message|>", "<|start|>assistant", ANSWER, None)
    final = '<|channel|>final<|message|>{"a": 1}'
    assert accepts(PLAIN_COMPILER, grammar, final)
    assert accepts(PLAIN_COMPILER, grammar, f"<|channel|>analysis<|message|>why<|end|><|start|>assistant{final}")
    assert not accepts(PLAIN_COMPILER, grammar, '{"a": 1}')
    for seed in range(5):
        ids, ended = sample(PLAIN_COMPILER, grammar, seed, length=400, max_tokens=400)
        assert ended and text_of(PLAIN_COMPILER, ids).endswith("}")


# --- calls ------------------------------------------------------------------------------------------------------------


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "a<b>", 'say "x"', "</tool_call>"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 3},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 1},
        "note": {"type": ["null", "integer"], "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get", "parameters": NOTHING}},
    {"type": "function", "function": {"name": "now"}},
]
NAMES = {"get_weather", "get", "now"}
FORMATS = [row.name for row in TOOL_CALL_FORMATS]


def marked_tokenizer(name: str, special: bool) -> JsonTokenizer:
    row = next(row for row in TOOL_CALL_FORMATS if row.name == name)
    markers = [marker for marker in row.markers if len(marker) > 3]
    return tokenizer(("<eos>", *(markers if special else ())), () if special else markers)


@pytest.mark.parametrize("style", ["text", "special", "added"])
@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_have_a_name_and_arguments_of_the_schema(name, style):
    jsonschema = pytest.importorskip("jsonschema")
    words = PLAIN if style == "text" else marked_tokenizer(name, style == "special")
    compiler = GrammarCompiler(words, words.vocab_size, [words.eos_id or 0])
    counts = []
    for max_calls in (1, None):
        grammar = CompletionGrammar(
            None, call_grammar(name, TOOLS, required=True, max_calls=max_calls), harmony=name == "harmony"
        )
        for seed in range(4):
            ids, ended = sample(compiler, grammar, seed, length=900, max_tokens=900)
            text = text_of(compiler, ids)
            assert ended, text
            parsed = parse_tool_calls(text, name, TOOLS)
            assert parsed.calls and not parsed.malformed, (text, parsed)
            assert len(parsed.calls) == 1 if max_calls == 1 else True
            counts.append(len(parsed.calls))
            for call in parsed.calls:
                assert call.name in NAMES
                jsonschema.validate(call.arguments, WEATHER if call.name == "get_weather" else {"maxProperties": 0})
    assert max(counts) >= 1


@pytest.mark.parametrize("style", ["text", "special"])
@pytest.mark.parametrize("name", FORMATS)
def test_max_calls_limits_calls_after_free_text(name, style):
    words = PLAIN if style == "text" else marked_tokenizer(name, True)
    compiler = GrammarCompiler(words, words.vocab_size, [words.eos_id or 0])
    grammar = CompletionGrammar(
        None, call_grammar(name, TOOLS[:1], required=False, max_calls=1), harmony=name == "harmony"
    )
    for seed in range(4):
        ids, _ = sample(compiler, grammar, seed)
        parsed = parse_tool_calls(text_of(compiler, ids), name, TOOLS)
        assert len(parsed.calls) <= 1


@pytest.mark.parametrize("style", ["text", "special"])
@pytest.mark.parametrize(
    "name", [name for name in FORMATS if name not in ("harmony", "llama3_json", "llama4_pythonic", "xlam")]
)
def test_free_text_ends_with_its_first_call(name, style):
    words = PLAIN if style == "text" else marked_tokenizer(name, True)
    compiler = GrammarCompiler(words, words.vocab_size, [words.eos_id or 0])
    required = CompletionGrammar(None, call_grammar(name, TOOLS[2:], required=True, max_calls=1))
    call, _ = sample(compiler, required, 1)
    once = CompletionGrammar(None, call_grammar(name, TOOLS[2:], required=False, max_calls=1))
    assert (
        accepts(compiler, once, "Well.\n")
        and accepts(compiler, once, "Well.\n", *call)
        and accepts(compiler, once, *call)
    )
    assert not accepts(compiler, once, "Well.\n", *call, *call) and not accepts(compiler, once, *call[:-3])
    other = CompletionGrammar(None, call_grammar(name, TOOLS[:2], required=False, max_calls=1))
    assert not accepts(compiler, other, "Well.\n", *call)  # the tool is not allowed


@pytest.mark.parametrize("name", FORMATS)
def test_answer_is_a_call_or_has_the_required_format(name):
    calls = call_grammar(name, TOOLS, required=False)
    required = CompletionGrammar(
        None, call_grammar(name, TOOLS[2:], required=True, max_calls=1), harmony=name == "harmony"
    )
    ids, _ = sample(PLAIN_COMPILER, required, 1, max_tokens=250)
    written = text_of(PLAIN_COMPILER, ids)
    grammar = CompletionGrammar(ANSWER, calls, harmony=name == "harmony")
    content = '{"a": 1}' if name != "harmony" else '<|channel|>final<|message|>{"a": 1}'
    assert accepts(PLAIN_COMPILER, grammar, content)
    assert not accepts(PLAIN_COMPILER, grammar, content.replace("1", "3")) and not accepts(
        PLAIN_COMPILER, grammar, "text"
    )
    assert accepts(PLAIN_COMPILER, grammar, written), written


def test_schemas_of_tools_are_checked_only_if_a_call_is_required():
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": odd}}]
    for name in ("hermes", "qwen3_coder", "lfm2", "gemma4"):
        prepare(PLAIN_COMPILER, CompletionGrammar(None, call_grammar(name, tools, required=False, max_calls=1)))
        with refused(ConfigError, '"f"', "`$.properties.a`", "uniqueItems"):
            prepare(PLAIN_COMPILER, CompletionGrammar(None, call_grammar(name, tools, required=True)))


def test_calls_follow_reasoning():
    calls = call_grammar("hermes", TOOLS[2:], required=True, max_calls=1)
    grammar = CompletionGrammar(None, calls, ReasoningGrammar("<think>", "</think>", True))
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts(PLAIN_COMPILER, grammar, f"why <tool_call></think>\n\n{call}")
    assert not accepts(PLAIN_COMPILER, grammar, call) and not accepts(PLAIN_COMPILER, grammar, f"why</think>a{call}")
    assert not accepts(PLAIN_COMPILER, grammar, f"why</think>{call}\n{call}")


def tool(parameters) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def call_accepted(name: str, parameters, arguments, *, required: bool = True, count: int = 1) -> bool:
    """Return whether the grammar accepts `count` calls with the given arguments in a tool-call format."""
    row = next(row for row in TOOL_CALL_FORMATS if row.name == name)
    written = row.write([FunctionCall("f", arguments)] * count)
    if row.syntax == "python":
        written = written.replace("'", '"')
    grammar = CompletionGrammar(
        None, call_grammar(name, tool(parameters), required=required), harmony=name == "harmony"
    )
    return accepts(PLAIN_COMPILER, grammar, written.removesuffix("<|call|>") if name == "harmony" else written)


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("harmony", "llama3_json")])
def test_calls_as_the_format_writes_them_are_accepted(name, required):
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    for arguments in ({"city": "P"}, {"city": "P", "days": 3}, {"city": "P", "exact": True}):
        for count in (1, 2, 3):
            assert call_accepted(name, parameters, arguments, required=required, count=count), (arguments, count)


def test_minimax_m3_writes_declared_lists_and_objects_as_elements():
    row = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["b"]}
    properties = {
        "rows": {"type": "array", "items": row, "maxItems": 2},
        "row": {"$ref": "#/$defs/row"},
        "open": {"type": "object"},
    }
    parameters = {"type": "object", "properties": properties, "$defs": {"row": row}}
    for arguments in (
        {"rows": [{"b": 1}, {"a": "x", "b": 2}]},
        {"rows": [], "row": {"a": "<x>", "b": 3}},
        {"row": {"b": 4}},
    ):
        assert call_accepted("minimax_m3", parameters, arguments), arguments
    for arguments in ({"rows": [{"b": 1}] * 3}, {"row": {"a": "x"}}, {"row": {"b": "x"}}):
        assert not call_accepted("minimax_m3", parameters, arguments), arguments
    written = ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<{}>{}]<]minimax[>[</{}>'
    end = "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
    grammar = CompletionGrammar(None, call_grammar("minimax_m3", tool(parameters), required=True))
    assert accepts(PLAIN_COMPILER, grammar, written.replace("<{}>{}", '<open>{"a": 1}').replace("{}", "open") + end)
    assert not accepts(PLAIN_COMPILER, grammar, written.replace("<{}>{}", '<row>{"b": 1}').replace("{}", "row") + end)


OTHER_SYNTAX = ("qwen3_coder", "deepseek_v32", "minimax_m2", "hy_v3", "lfm2", "gemma4")
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}
# Schemas of parameters, with arguments that match and arguments that do not match.
PARAMETERS = {
    "reference": ({"$ref": "#/$defs/A", "$defs": {"A": A}}, [{"a": 1}], [{}, {"b": "x"}]),
    "anyOf": ({"anyOf": [A, B]}, [{"a": 1}, {"b": "x"}], [{}, {"a": 1, "b": "x"}]),
    "anyOf next to properties": ({**A, "anyOf": [B, {}]}, [{"a": 1, "b": "x"}, {"a": 1}], [{"b": "x"}]),
    "allOf": ({"allOf": [A, B]}, [{"a": 1, "b": "x"}], [{"a": 1}, {"b": "x"}]),
    "open": ({"type": "object"}, [{}, {"x": 1}, {"x": "y", "z": 2}], []),
    "empty": ({}, [{}, {"x": 1}], []),
    "without type": ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, [{"a": 1}], [{}]),
    "additional": (
        {**A, "additionalProperties": {"type": "integer"}},
        [{"a": 1}, {"a": 1, "ab": 2}, {"a": 1, "x": 2, "y": 3}],
        [{"x": 2}, {"a": 1, "x": "t"}],
    ),
    "required but not declared": ({**A, "required": ["a", "c"]}, [{"a": 1, "c": 2}], [{"a": 1}]),
}


@pytest.mark.parametrize("name", ["hermes", *OTHER_SYNTAX])
@pytest.mark.parametrize("kind", PARAMETERS)
def test_parameters_follow_schemas_with_compositions(kind, name):
    parameters, good, bad = PARAMETERS[kind]
    for arguments in good:
        assert call_accepted(name, parameters, arguments), arguments
        assert call_accepted(name, parameters, arguments, required=False), arguments
    for arguments in bad:
        if not (name == "hermes" and kind in ("allOf", "required but not declared", "anyOf next to properties")):
            assert not call_accepted(name, parameters, arguments), arguments


E = {"enum": ["x", "y"]}


def nested(schema, levels: int) -> dict[str, Any]:
    """Return the schema of lists of objects, which are nested `levels` deep around values of another schema."""
    for _ in range(levels):
        inner = {"type": "object", "properties": {"k": schema}, "required": ["k"], "additionalProperties": False}
        schema = {"type": "array", "items": inner}
    return schema


NODE = {
    "type": "object",
    "properties": {"k": E, "n": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}], "default": None}},
    "required": ["k", "n"],
    "additionalProperties": False,
}
VALUES = {
    "nested": (nested(E, 3), [[{"k": [{"k": [{"k": "x"}]}]}]], [[{"k": [{"k": [{"k": "z"}]}]}], [{"k": [{"z": []}]}]]),
    "recursive": (
        {"$ref": "#/$defs/N"},
        [{"k": "x", "n": {"k": "y", "n": {"k": "x", "n": None}}}],
        [{"k": "x", "n": {"k": "y", "n": {"k": "z", "n": None}}}, {"k": "x", "n": {"k": "y", "n": {"k": "x"}}}],
    ),
    "anything nested": (nested({}, 3), [[{"k": [{"k": [{"k": [[[{"a": 1}]], {}]}]}]}]], []),
    "reference": ({"$ref": "#/$defs/E"}, ["x"], ["zzz"]),
    "optional": ({"anyOf": [E, {"type": "null"}]}, ["x", None], ["zzz", 1]),
    "allOf": ({"allOf": [{"$ref": "#/$defs/E"}], "description": "d"}, ["y"], ["zzz"]),
    "literal or number": ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, ["auto", 12], ["zzz"]),
    "typed": ({"type": ["integer", "null"]}, [1, None], ["zzz"]),
    "nullable": ({"type": ["string", "null"]}, ["x", None], []),
    "oneOf": ({"oneOf": [{"type": "boolean"}, {"type": "integer"}]}, [True, 5], ["zzz"]),
    "anything": ({}, ["x", 1, None, True], []),
}


@pytest.mark.parametrize("name", ["hermes", *OTHER_SYNTAX])
@pytest.mark.parametrize("kind", VALUES)
def test_values_of_parameters_follow_schemas_with_compositions(kind, name):
    schema, good, bad = VALUES[kind]
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": {"E": E, "N": NODE}}
    for value in good:
        assert call_accepted(name, parameters, {"a": value}), value
        assert call_accepted(name, parameters, {"a": value}, required=False), value
    for value in bad:
        assert not call_accepted(name, parameters, {"a": value}), value


def test_json_arguments_are_objects():
    for parameters in ({}, {"properties": {"a": {}}}, {"type": ["object", "null"]}):
        grammar = CompletionGrammar(None, call_grammar("hermes", tool(parameters), required=True))
        for written in ("5", '"x"', "null"):
            call = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
            assert not accepts(PLAIN_COMPILER, grammar, call)


BROKEN = [{"required": True}, {"properties": ["a"]}, {"allOf": 5}, {"type": "float"}, {"type": "string"}]
INNER = [{"minItems": None}, {"type": "object", "required": True}, {"type": "any"}, {"anyOf": 5}]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "lfm2", "gemma4"])
@pytest.mark.parametrize("parameters", [*BROKEN, *({"properties": {"a": inner}} for inner in INNER)])
def test_invalid_parameters_are_refused_only_if_a_call_is_required(parameters, name):
    prepare(PLAIN_COMPILER, CompletionGrammar(None, call_grammar(name, tool(parameters), required=False)))
    with pytest.raises(ConfigError):
        prepare(PLAIN_COMPILER, CompletionGrammar(None, call_grammar(name, tool(parameters), required=True)))


WRONG = [
    {"uniqueItems": True},
    {"type": "float"},
    {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6},
    {"type": "string", "pattern": "(?=a)b"},
]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "lfm2", "gemma4"])
@pytest.mark.parametrize("inner", WRONG)
def test_errors_about_parameters_name_the_tool(inner, name):
    if "pattern" in inner and name in ("qwen3_coder", "gemma4"):
        pytest.skip("this format does not constrain the pattern of a string")
    tools = [*TOOLS, *tool({"properties": {"a": inner}, "required": ["a"]})]
    for form in (None, ANSWER):
        with refused(ConfigError, '"f"', "a"):
            prepare(PLAIN_COMPILER, CompletionGrammar(form, call_grammar(name, tools, required=True)))


@pytest.mark.parametrize("name", ["lfm2", "gemma4"])
def test_prefix_items_are_refused_in_formats_that_cannot_express_them(name):
    parameters = {"properties": {"a": {"type": "array", "prefixItems": [{"type": "integer"}]}}}
    with refused(ConfigError, '"f"', "prefixItems", name, "`items`"):
        prepare(PLAIN_COMPILER, CompletionGrammar(None, call_grammar(name, tool(parameters), required=True)))


@pytest.mark.slow(fast=("allOf",))
@pytest.mark.parametrize("keyword", ["allOf", "anyOf"])
def test_exponentially_repeated_references_take_bounded_time(keyword):
    definitions: dict[str, Any] = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 20} for i in range(8)}
    parameters = {"$defs": definitions | {"d8": A}, "type": "object", "properties": {"p": {"$ref": "#/$defs/d0"}}}
    for name in ("qwen3_coder", "lfm2"):
        call_grammar(name, tool(parameters), required=False)
        with pytest.raises(ConfigError):
            prepare(PLAIN_COMPILER, CompletionGrammar(None, call_grammar(name, tool(parameters), required=True)))


def test_lark_grammars_in_json_may_contain_special_tokens():
    compiler = COMPILERS["bytes"]
    grammars = [{"lark_grammar": 'start: <|user|> "x"'}]
    grammar = Grammar("grammar", json.dumps({"grammars": grammars}))
    assert accepts(compiler, grammar, names(compiler)["<|user|>"], "x")
    grammars = [{"lark_grammar": 'start: <|unknown|> "x"'}]
    with refused(ConfigError, "<|unknown|>") as error:
        prepare(compiler, Grammar("grammar", json.dumps({"grammars": grammars})))
    assert str(error.value).isascii()


def test_types_of_schemas():
    root = {"$defs": {"n": {"type": ["integer", "null"]}, "loop": {"$ref": "#/$defs/loop"}}}
    types = SchemaReader(root).types
    assert types({"$ref": "#/$defs/n"}) == {"integer", "null"}
    assert types({"anyOf": [{"const": 1}, {"enum": ["a", True]}]}) == {"integer", "string", "boolean"}
    assert types({"allOf": [{"type": ["string", "number"]}, {"type": "number"}]}) == {"integer", "number"}
    assert len(types({})) == len(types({"$ref": "#/$defs/loop"})) == len(types(True)) == 7


def test_markers_have_no_surrounding_spaces():
    assert all(marker == marker.strip() and marker for marker in MARKERS)
    assert isinstance(call_grammar("hermes", TOOLS, required=True), CallGrammar)
