"""Grammars of constrained answers: optional reasoning, then an answer of a given form or tool calls.

A grammar is written in llguidance's dialect of Lark. Markers that are tokens of the tokenizer (`control`) are matched
by id. All other text of a grammar, such as a literal that contains the name of a special token, is matched as ordinary
text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from eqx_decoders.errors import ConfigError
from eqx_decoders.io.text.answers.formats import (
    REASONING_FORMATS,
    TOOL_CALL_FORMAT,
    TOOL_CALL_FORMATS,
    ToolCallFormat,
    ToolFormat,
    functions_of,
    reasoning_format,
    tool_format,
)
from eqx_decoders.serving.frontend.json_schemas import NUMBER_RULES, STRING_RULES, prepare_schema


Kind = Literal["json", "regex", "choice", "grammar"]

# Between the parts of JSON: nothing, a space, or a new line with indentation. Without a limit, a model may write blanks
# forever.
BLANKS = r"\x20?|\x0D?\x0A[\x20\x09]{0,20}"
OPTIONS = {"whitespace_pattern": BLANKS}

# Names of added tokens that are matched by id where a grammar has them as markers, also if they are not special tokens.
MARKERS = frozenset(
    {
        *(marker for row in TOOL_CALL_FORMATS for marker in row.markers),
        *(text for row in REASONING_FORMATS for text in (row.begin, row.end)),
        *(text for row in REASONING_FORMATS for pair in row.wrappers for text in pair),
        # gpt-oss writes its reasoning in messages of the same format as its calls
        *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
        *("<|channel>", "<answer>", "</answer>"),
    }
)
MAX_NESTING = 4  # of lists and objects in calls that are not written as JSON
HARMONY_REASONING = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
HARMONY_FINAL = "<|channel|>final<|message|>"

_LARK_TOKENS = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|/(?:\\.|[^/\\\n])++/?|//[^\n]*|#[^\n]*|<[^<>\s\[\]]+>'
)


class Grammar(NamedTuple):
    """Form of an answer.

    - `kind`: `"json"`, `"regex"`, `"choice"` or `"grammar"`.
    - `content`: the JSON Schema as text, the regular expression (of Rust's crate `regex`, without look-around), the
        allowed texts, or the grammar in llguidance's dialect of Lark.
    """

    kind: Kind
    content: str | tuple[str, ...]


ANY_OBJECT = Grammar("json", '{"type": "object"}')


class CallGrammar(NamedTuple):
    """Tool calls that an answer may or must have.

    - `format`: row of the table of formats.
    - `tools`: name, and JSON Schema of the arguments as text, of each tool that may be called.
    - `required`: the answer must be a call.
    - `max_calls`: maximum number of calls; None: unlimited.
    """

    format: ToolFormat
    tools: tuple[tuple[str, str], ...]
    required: bool
    max_calls: int | None = None


def call_grammar(
    format: ToolFormat, tools: Sequence[Mapping[str, Any]], *, required: bool, max_calls: int | None = None
) -> CallGrammar:
    """Return the grammar of calls of some tools.

    If calls are required, arguments match the schemas of the tools. Otherwise an answer need not call a tool, and
    arguments only have the form that calls of this format have.
    """
    as_json = TOOL_CALL_FORMAT[format].syntax in ("json", "named_json", "harmony")
    schemas = dict[str, str]()
    for function in functions_of(tools):
        schema = function.get("parameters")
        if not isinstance(schema, dict):
            schema = {"type": "object", "properties": {}, "additionalProperties": False}
        elif not required:
            schema = {"type": "object"} if as_json else _types_only(schema)
        schemas[str(function["name"])] = json.dumps(schema, ensure_ascii=False)
    return CallGrammar(format, tuple(schemas.items()), required, max_calls)


def _types_only(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    kinds = {
        name: {"type": sorted(types_of(inner, schema))}
        for name, inner in (properties.items() if isinstance(properties, dict) else ())
    }
    return {"type": "object", "properties": kinds, "required": schema.get("required") or []}


class ReasoningGrammar(NamedTuple):
    """Reasoning before an answer.

    - `begin`, `end`: markers around the reasoning.
    - `opened`: the prompt ends with `begin`. Otherwise the reasoning is optional.
    """

    begin: str
    end: str
    opened: bool


class AnswerGrammar(NamedTuple):
    """Grammar of an answer of a chat.

    - `form`: form of the final answer; None: free text, unless calls are required.
    - `calls`: tool calls that the answer may have in place of its form, or after free text; None: no calls.
    - `reasoning`: reasoning before the answer; None: no reasoning.
    - `wrappers`: pairs of optional markers around the answer.
    - `harmony`: the answer consists of the messages of gpt-oss.
    """

    form: Grammar | None = None
    calls: CallGrammar | None = None
    reasoning: ReasoningGrammar | None = None
    wrappers: tuple[tuple[str, str], ...] = ()
    harmony: bool = False

    @property
    def kind(self) -> str:
        """Name of the constraint in error messages."""
        return "tool_choice" if self.form is None else self.form.kind

    @property
    def size(self) -> int:
        """Number of characters that a client has sent."""
        length = 0 if self.form is None else sum(map(len, self.form.content))
        tools = () if self.calls is None else self.calls.tools
        return length + sum(len(name) + len(schema) for name, schema in tools)

    @property
    def end_marker(self) -> str:
        """Marker that ends the reasoning; empty without reasoning."""
        if self.harmony:
            return HARMONY_REASONING[1]
        return "" if self.reasoning is None else self.reasoning.end

    @property
    def begin_marker(self) -> str:
        """Marker that starts the reasoning; empty if the prompt has it."""
        if self.harmony:
            return HARMONY_REASONING[0]
        return "" if self.reasoning is None or self.reasoning.opened else self.reasoning.begin


def chat_grammar(
    template: str, prompt_end: str, form: Grammar | None, calls: CallGrammar | None
) -> AnswerGrammar | Grammar | None:
    """Return the grammar of the answer to a conversation; None for free text.

    **Arguments:**

    - `template`: source of the chat template, which tells the markers of reasoning.
    - `prompt_end`: end of the prompt, which may start the reasoning or exclude it.
    - `form`: form of the final answer, after any reasoning.
    - `calls`: tool calls that are constrained.
    """
    if form is None and calls is None:
        return None
    if calls is not None and calls.required:
        form = None
    if tool_format(template) == "harmony" or (calls is not None and calls.format == "harmony"):
        return AnswerGrammar(form, calls and calls._replace(format="harmony"), harmony=True)
    row = reasoning_format(template)
    if row is None:
        return form if calls is None else AnswerGrammar(form, calls)
    end = prompt_end.rstrip()
    closed = end.endswith(row.end)
    reasoning = None if closed else ReasoningGrammar(row.begin, row.end, end.endswith(row.begin))
    return AnswerGrammar(form, calls, reasoning, tuple(row.wrappers))


def simplified(grammar: AnswerGrammar, control: Mapping[str, int]) -> AnswerGrammar:
    """Return a grammar without optional reasoning that cannot change the answer, or that the form has itself.

    If there is only one text that the answer may have, there is nothing to reason about, and no call in its place.
    Texts that contain markers of the reasoning, which are no tokens of this tokenizer, are complete outputs.
    """
    form = grammar.form
    if form is None or not isinstance(form.content, tuple):
        return grammar
    row = grammar.reasoning
    markers = ("<|message|>",) if grammar.harmony else () if row is None else (row.begin, row.end)
    markers = tuple(marker for marker in markers if marker not in control)
    if any(marker in text for text in form.content for marker in markers):
        return AnswerGrammar(form)
    if len(form.content) == 1:
        return grammar._replace(calls=None, reasoning=row if row is not None and row.opened else None)
    return grammar


def to_llguidance(
    grammar: "Grammar | AnswerGrammar",
    control: Mapping[str, int],
    stop_ids: Sequence[int] = (),
    *,
    reasoning_ends: bool = False,
) -> str:
    """Write a grammar for llguidance.

    **Arguments:**

    - `control`: ids of the tokens that are matched by id, by their names.
    - `stop_ids`: ids that end an answer: they are left out at the end of a call.
    - `reasoning_ends`: start with the end of the reasoning in place of the reasoning.

    Raises ConfigError for schemas and calls that constrained answers do not support.
    """
    if isinstance(grammar, Grammar):
        return _dump(_form(grammar, control))
    writer = _Writer(control, stop_ids)
    return _dump([{"lark_grammar": writer.answer(grammar, reasoning_ends)}, *writer.grammars])


def without_forcing(source: str) -> str:
    """Return a grammar that llguidance matches token by token.

    Otherwise llguidance encodes text that the grammar forces, and fails if the tokenizer changes that text (for example
    a normalizer, or SentencePiece for the character U+2581).
    """
    first, *others = json.loads(source)["grammars"]
    header = '%llguidance {"no_forcing": true}\n'
    if "lark_grammar" in first:
        lark = header + first["lark_grammar"]
    else:
        lark = f"{header}start: %json {json.dumps(first['json_schema'], ensure_ascii=False)}"
    return _dump([{"lark_grammar": lark}, *others])


def _dump(grammars: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _form(form: Grammar, control: Mapping[str, int]) -> list[dict[str, Any]]:
    """Write the form of an answer as a grammar of llguidance, which may use others."""
    if isinstance(form.content, tuple):
        return [{"lark_grammar": "start: " + " | ".join(quoted(text) for text in form.content)}]
    if form.kind == "json":
        return [{"json_schema": _with_options(prepare_schema(_parse(form.content)))}]
    if form.kind == "regex":
        return [{"lark_grammar": f"start: /{_escaped_slashes(form.content)}/"}]
    if form.content.lstrip().startswith("{"):  # several grammars, in llguidance's JSON
        content = _parse(form.content, form.kind)
        grammars = content.get("grammars")
        if not isinstance(grammars, list) or not grammars or not all(isinstance(item, dict) for item in grammars):
            raise ConfigError("grammar cannot be read: give Lark, or an object with grammars, a list of objects.")
        return grammars
    return [{"lark_grammar": with_token_ids(form.content, control)}]


def _parse(text: str, kind: str = "json") -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{kind} cannot be read: {error}.") from error


def _with_options(schema: Any) -> Any:
    return {**schema, "x-guidance": OPTIONS} if isinstance(schema, dict) else schema


def _escaped_slashes(regex: str) -> str:
    return re.sub(r"\\.|/|\n", lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), regex, flags=re.DOTALL)


def with_token_ids(lark: str, control: Mapping[str, int]) -> str:
    """Replace the names of tokens in a grammar, `<name>`, by their ids, `<[id]>`; not in literals and comments."""

    def replace(match: re.Match[str]) -> str:
        return f"<[{control[match[0]]}]>" if match[0] in control else match[0]

    return _LARK_TOKENS.sub(replace, lark)


def quoted(text: str) -> str:
    """Write text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # llguidance wants it escaped


class _Writer:
    """Writer of the rules of one answer."""

    def __init__(self, control: Mapping[str, int], stop_ids: Sequence[int]):
        self._control, self._stop_ids = control, frozenset(stop_ids)
        names = sorted((name for name in control if name in MARKERS), key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: dict[str, str] = {}  # bodies, with options, by name
        self.grammars: list[dict[str, Any]] = []

    def answer(self, grammar: AnswerGrammar, reasoning_ends: bool) -> str:
        body = self._harmony(grammar, reasoning_ends) if grammar.harmony else self._plain(grammar, reasoning_ends)
        return "\n".join([f"start: {body}", *(f"{name}{rule}" for name, rule in self._rules.items())])

    def _plain(self, grammar: AnswerGrammar, reasoning_ends: bool) -> str:
        answer = self._wrapped(self._body(grammar), grammar.wrappers)
        reasoning = grammar.reasoning
        if reasoning is None or self._stop_ids & set(self._pieces(reasoning.end)):
            return answer
        blanks = self.rule("blanks", r"/\n{0,2}/")
        if reasoning_ends:
            return f"{self.text(reasoning.end)} {blanks} {answer}"
        rest = f"{self.until(reasoning.end)} {blanks}"
        if reasoning.opened:
            return f"{rest} {answer}"
        return f"({self.text(reasoning.begin)} {rest})? {answer}"

    def _harmony(self, grammar: AnswerGrammar, reasoning_ends: bool) -> str:
        begin, end = HARMONY_REASONING
        alternatives = []
        calls = grammar.calls
        if calls is not None:
            alternatives.append(self._calls(calls, skip="<|start|>assistant"))
        if calls is None or not calls.required:
            final = "@answer" if self._add_form(grammar.form) else self._free_text()
            alternatives.append(f"{self.text(HARMONY_FINAL)} {final}")
        answer = self.rule("answer", " | ".join(alternatives))
        if self._stop_ids & set(self._pieces(end)):  # such an answer ends with its first message
            return answer
        if reasoning_ends:
            return f"{self.text(end)} {answer}"
        return f"({self.text(begin)} {self.until(end)})? {answer}"

    def _wrapped(self, answer: str, wrappers: Sequence[tuple[str, str]]) -> str:
        for begin, end in wrappers:
            answer = self.rule("wrapped", f"{answer} | {self.text(begin)} /\\n?/ {answer} /\\n?/ {self.text(end)}")
        return answer

    def _body(self, grammar: AnswerGrammar) -> str:
        """Return the rule of the answer after its reasoning."""
        calls, has_form = grammar.calls, self._add_form(grammar.form)
        if calls is None:
            return "@answer" if has_form else self._free_text()
        row = TOOL_CALL_FORMAT[calls.format]
        if calls.required:
            return self._calls(calls)
        if has_form and grammar.form is not None:
            alternatives = [self._calls_next_to(row, calls, grammar.form), "@answer"]
            return self.rule("answer", " | ".join(alternatives))
        return self.rule("answer", self._text_or_calls(row, calls))

    def _calls_next_to(self, row: ToolCallFormat, calls: CallGrammar, form: Grammar) -> str:
        """Return the rule of calls in place of a form. Their starts must differ where calls have no marker."""
        if not row.bare or self._begins(row):
            return self._calls(calls)
        if form.kind != "json":
            return f"{self.text(row.begins[0])} {self._calls(calls)}"
        if row.syntax != "json":
            return self._calls(calls)
        # llguidance can choose between several JSON Schemas, but not between a schema and a literal of JSON
        schemas = []
        for name, text in calls.tools:
            properties = {row.name_keys[0]: {"const": name}, row.argument_keys[-1]: prepare_schema(_parse(text))}
            schemas.append({"type": "object", "properties": properties, "required": list(properties)})
        schemas = [{**schema, "additionalProperties": False} for schema in schemas]
        return " | ".join(f"%json {json.dumps(_with_options(schema), ensure_ascii=False)}" for schema in schemas)

    def _add_form(self, form: Grammar | None) -> bool:
        if form is not None:
            first, *others = _form(form, self._control)
            self.grammars += [{**first, "name": "answer"}, *others]
        return form is not None

    # --- text ---------------------------------------------------------------------------------------------------------

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Add a rule, or find an equal one, and return its name."""
        rule = f"{options}: {body}"
        same = next((other for other, known in self._rules.items() if known == rule), None)
        if same is not None:
            return same
        name = f"{name}_{len(self._rules)}"
        self._rules[name] = rule
        return name

    def _terminal(self, body: str) -> str:
        return self.rule("TEXT", body)

    def _free_text(self) -> str:
        return self.rule("text", "/(?s:.*)/")

    def _pieces(self, text: str) -> list[str | int]:
        """Split text into literals and the ids of markers."""
        pieces, start = list[str | int](), 0
        for match in self._marker.finditer(text) if self._marker is not None else ():
            pieces += [text[start : match.start()], self._control[match[0]]]
            start = match.end()
        return [piece for piece in (*pieces, text[start:]) if piece != ""]

    def text(self, text: str) -> str:
        """Return the elements of a rule that match text with markers. `{index}` matches any number."""
        elements = []
        for piece in self._pieces(text):
            if isinstance(piece, int):
                elements.append(f"<[{piece}]>")
            else:
                head, *tails = piece.split("{index}")
                elements += [quoted(head)] if head else []
                for tail in tails:
                    elements += ["/[0-9]{1,3}/", *([quoted(tail)] if tail else [])]
        return " ".join(elements)

    def until(self, text: str) -> str:
        """Return the elements of a rule that match any text up to a marker, and the marker."""
        pieces = self._pieces(text)
        index = next((index for index, piece in enumerate(pieces) if isinstance(piece, int)), None)
        if index is None:
            return self.rule("until", f"/(?s:.*)/ {quoted(text)}", "[lazy]")
        literals = "".join(str(piece) for piece in pieces[:index])
        before = f"/(?s:.*)/ {quoted(literals)}" if literals else "/(?s:.*)/"
        rest = "".join(self._name(piece) for piece in pieces[index:])
        return f"{self._terminal(before)} {self.text(rest)}"

    def _name(self, piece: str | int) -> str:
        return piece if isinstance(piece, str) else next(n for n, token in self._control.items() if token == piece)

    def _without_stop_tokens(self, text: str) -> str:
        """Leave out the markers at the end of text that end the answer."""
        pieces = self._pieces(text)
        while pieces and pieces[-1] in self._stop_ids:
            pieces.pop()
        return "".join(map(self._name, pieces))

    # --- calls --------------------------------------------------------------------------------------------------------

    def _begins(self, row: ToolCallFormat) -> str:
        """Return the marker with which calls as `row` writes them start; empty if they start without a marker."""
        written = row.section_begin + row.call_begin
        return next((marker for marker in row.begins if written.startswith(marker)), "")

    def _text_or_calls(self, row: ToolCallFormat, calls: CallGrammar) -> str:
        """Return free text without the start of a call, or text and calls."""
        marker = self._begins(row)
        if not marker:  # calls without a marker are a complete answer
            first = (row.section_begin + row.call_begin)[:1]
            text = self._terminal(f'/[^{re.escape(first)}](?s:.*)/ & {self._without(row.begins)} | ""')
            return f"{self._calls(calls)} | {text}"
        others = [begin for begin in row.begins if begin != marker]
        text = self._terminal(self._without(others))
        if any(isinstance(piece, int) for piece in self._pieces(marker)):
            head = self.until(marker)
        else:  # lazy: text ends where the marker does
            head = self.rule("head", f"{text} {quoted(marker)}", "[lazy]")
        return f"{text} | {head} {self._calls(calls, skip=marker)}"

    def _without(self, texts: Sequence[str]) -> str:
        """Return a terminal of all texts that contain none of some texts."""
        excluded = "".join(
            f" & ~/(?s:.*){_escaped_slashes(re.escape(text))}(?s:.*)/"
            for text in texts
            if all(isinstance(piece, str) for piece in self._pieces(text))
        )
        return f"/(?s:.*)/{excluded}"

    def _calls(self, calls: CallGrammar, skip: str = "") -> str:
        """Return the rule of a list of calls. `skip`: start of the text, which is already matched."""
        row = TOOL_CALL_FORMAT[calls.format]
        arguments = [(name, self._arguments(row, _parse(schema))) for name, schema in calls.tools]
        begin = row.call_begin if row.section_begin else row.call_begin.removeprefix(skip)
        first = self._call(row, begin, arguments)
        elements = [self.text(row.section_begin.removeprefix(skip)), first]
        if calls.max_calls is None:
            following = self._call(row, row.call_begin, arguments)
            elements.append(f"({self.text(row.separator)} {following})*")
        elif calls.max_calls > 1:
            following = self._call(row, row.call_begin, arguments)
            elements.append(f"({self.text(row.separator)} {following}){{0,{calls.max_calls - 1}}}")
        elements.append(self.text(self._without_stop_tokens(row.section_end)))
        return self.rule("calls", " ".join(element for element in elements if element))

    def _call(self, row: ToolCallFormat, begin: str, arguments: Sequence[tuple[str, str]]) -> str:
        end = row.call_end if row.section_end else self._without_stop_tokens(row.call_end)
        alternatives = []
        for name, body in arguments:
            alternatives.append(f"{self.text(begin + name + row.name_end)} {body} {self.text(end)}".strip())
        return self.rule("call", " | ".join(alternatives))

    def _arguments(self, row: ToolCallFormat, schema: Any) -> str:
        schema = prepare_schema(schema)
        if row.syntax in ("json", "named_json", "harmony"):
            return f"%json {json.dumps(_with_options(schema), ensure_ascii=False)}"
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        if row.syntax == "xml":
            items = [(self._parameter(row, key, inner, schema), key in required) for key, inner in properties.items()]
            separator = row.parameter_separator
        else:
            values = _Values(row, schema, self)
            sign = "=" if row.syntax == "python" else ":"
            items = [(f"{quoted(key + sign)} {values.of(inner)}", key in required) for key, inner in properties.items()]
            separator = ", " if row.syntax == "python" else ","
        return self.ordered(items, self.text(separator))

    def ordered(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the rule of a sequence of items, of which some are required, with separators between them."""
        first = following = '""'
        for item, required in reversed(items):
            after = following
            if required:
                following, first = f"{separator} {item} {after}", f"{item} {after}"
            else:
                following, first = f"({separator} {item})? {after}", f"({item} {after} | {first})"
            following, first = self.rule("items", following), self.rule("items", first)
        return first

    def _parameter(self, row: ToolCallFormat, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        """Return the elements of one parameter of an XML format."""
        types = types_of(schema, root)
        literals = _literals(schema)
        is_text = "string" in types
        key_end = row.key_end.replace("{string}", "true" if is_text else "false")
        begin, end = self.text(row.parameter_begin + key + key_end), row.parameter_end.replace("{key}", key)
        if literals is not None:
            texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in literals]
            body = f"({' | '.join(quoted(text) for text in texts)}) {self.text(end)}"
        elif is_text:
            body = self.until(end)
        else:
            definitions = {name: root[name] for name in ("$defs", "definitions", "$schema") if name in root}
            inner = {**definitions, **schema} if isinstance(schema, dict) else schema
            body = f"%json {json.dumps(_with_options(inner), ensure_ascii=False)} {self.text(end)}"
        return self.rule("parameter", f"{begin} {body}")


class _Values:
    """Writer of the rules of values in calls that are written as in Python, or as Gemma writes them.

    Types, constants, enumerations, properties, numbers of items and rules on numbers are constrained; rules on strings
    in Python only.
    """

    def __init__(self, row: ToolCallFormat, root: Mapping[str, Any], writer: _Writer):
        self._row, self._root, self._writer = row, root, writer
        self._python = row.syntax == "python"
        self._names = ("True", "False", "None") if self._python else ("true", "false", "null")
        self._separator = quoted(", " if self._python else ",")

    def of(self, schema: Any, depth: int = 0) -> str:
        """Return the rule of the values of a schema."""
        schema = _resolved(schema, self._root)
        literals = _literals(schema)
        if literals is not None:
            return self._writer.rule("value", " | ".join(self._literal(value) for value in literals))
        true, false, null = map(quoted, self._names)
        types = types_of(schema, self._root)
        options = (schema.get("anyOf") or schema.get("oneOf")) if isinstance(schema, dict) else None
        if isinstance(options, list) and options and depth < MAX_NESTING:
            return self._writer.rule("value", " | ".join(self.of(option, depth + 1) for option in options))
        alternatives = []
        if "boolean" in types:
            alternatives += [true, false]
        if "null" in types:
            alternatives.append(null)
        if types & {"number", "integer"}:
            alternatives.append(self._as_json("number" if "number" in types else "integer", NUMBER_RULES, schema))
        if "string" in types:
            alternatives.append(self._as_json("string", STRING_RULES, schema) if self._python else self._string())
        if "array" in types or "object" in types:
            items = schema.get("items") if isinstance(schema, dict) else None
            simple = isinstance(items, dict) and depth < MAX_NESTING
            item = self.of(items, depth + 1) if simple else self._any(depth)
            if "array" in types:
                alternatives.append(self._array(item, schema if isinstance(schema, dict) else {}))
            if "object" in types:
                alternatives.append(self._object(schema if isinstance(schema, dict) else {}, depth))
        return self._writer.rule("value", " | ".join(alternatives) or null)

    def _as_json(self, kind: str, rules: Sequence[str], schema: Any) -> str:
        """Return the rule of numbers or texts that are written as in JSON."""
        kept = {rule: schema[rule] for rule in rules if isinstance(schema, dict) and rule in schema}
        return self._writer.rule(
            "value", f"%json {json.dumps(_with_options({'type': kind, **kept}), ensure_ascii=False)}"
        )

    def _array(self, item: str, schema: Mapping[str, Any]) -> str:
        minimum, maximum = schema.get("minItems", 0), schema.get("maxItems")
        if maximum == 0:
            return '"[" "]"'
        more = f"({self._separator} {item}){{{max(0, minimum - 1)},{'' if maximum is None else maximum - 1}}}"
        more = "" if maximum == 1 else more
        return f'"[" {item} {more} "]"' if minimum else f'"[" ({item} {more})? "]"'

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = schema.get("properties")
        if isinstance(properties, dict) and properties and depth < MAX_NESTING:
            required = schema.get("required") or ()
            items = [
                (f"{self._name(key)} {self.of(inner, depth + 1)}", key in required) for key, inner in properties.items()
            ]
            return f'"{{" {self._writer.ordered(items, self._separator)} "}}"'
        member = f"{self._key()} {self._any(depth)}"
        return f'"{{" ({member} ({self._separator} {member})*)? "}}"'

    def _name(self, key: str) -> str:
        return quoted(json.dumps(key, ensure_ascii=False) + ": " if self._python else f"{key}:")

    def _any(self, depth: int) -> str:
        """Return the rule of any value, with lists and objects up to a depth."""
        types = ["string", "number", "boolean", "null", *(("array", "object") if depth < MAX_NESTING else ())]
        return self.of({"type": types}, depth + 1)

    def _string(self) -> str:
        if self._python:
            return r'/"([^"\\\x00-\x1F\x7F]|\\["\\nrt])*"/'
        return f"{self._writer.text(self._row.quote)} {self._writer.until(self._row.quote)}"

    def _key(self) -> str:
        return f'{self._string()} ": "' if self._python else '/[A-Za-z_][A-Za-z0-9_.-]{0,63}/ ":"'

    def _literal(self, value: Any) -> str:
        if isinstance(value, str) and not self._python:
            quote = self._writer.text(self._row.quote)
            return f"{quote} {quoted(value) if value else ''} {quote}"
        if isinstance(value, bool) or value is None:
            return quoted(self._names[{True: 0, False: 1, None: 2}[value]])
        if isinstance(value, list | dict) and not self._python:
            raise ConfigError(
                f"tool_choice cannot be kept: enum and const of lists and objects are not supported for calls in the "
                f"format {self._row.name}. Leave {json.dumps(value)[:80]} out."
            )
        return quoted(json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value))


ALL_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the names of the JSON types that a schema allows; all types if this is not known."""
    schema = _resolved(schema, root)
    if not isinstance(schema, dict) or depth > 8:
        return ALL_TYPES
    types = ALL_TYPES
    literals = _literals(schema)
    if literals is not None:
        types = types & {_type_of(value) for value in literals}
    declared = schema.get("type")
    if isinstance(declared, str | list):
        names = {declared} if isinstance(declared, str) else {name for name in declared if isinstance(name, str)}
        types = types & (names | ({"integer"} if "number" in names else set()))
    for keyword in ("anyOf", "oneOf"):
        options = schema.get(keyword)
        if isinstance(options, list):
            types = types & frozenset().union(*(types_of(option, root, depth + 1) for option in options))
    for option in schema.get("allOf") or ():
        types = types & types_of(option, root, depth + 1)
    return types


def _type_of(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def _literals(schema: Any) -> list[Any] | None:
    """Return the values of `const` or `enum`."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follow a reference within a schema."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        target: Any = root
        for key in reference[2:].split("/"):
            key = key.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        if target is None:
            return schema
        schema = target
    return schema
