"""Grammars of constrained completions: optional reasoning, then content that matches a grammar, or tool calls.

Grammars are written in llguidance's dialect of Lark. A marker that is a single token of the tokenizer (a control token)
is matched by its id. All other text of a grammar, such as a literal that contains the name of a special token, is
matched as ordinary text.
"""

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from eqx_decoders.errors import ConfigError
from eqx_decoders.io.text.output_parsing.formats import (
    CONTENT_WRAPPERS,
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    TOOL_CALL_FORMATS_BY_NAME,
    ToolCallFormat,
    ToolFormatName,
    find_reasoning_format,
    iter_functions,
    tool_format_or_default,
)
from eqx_decoders.serving.frontend.api_errors import shown
from eqx_decoders.serving.frontend.json_schemas import NUMBER_RULES, STRING_RULES, prepare_schema
from eqx_decoders.serving.frontend.schema_reader import (
    ALL_TYPES,
    RULES,
    Arguments,
    SchemaReader,
    VisitBudget,
    type_of,
)


Kind = Literal["json", "regex", "choice", "grammar"]
LABELS: Mapping[Kind, str] = {
    "json": "The JSON Schema",
    "regex": "The regular expression",
    "choice": "The choice",
    "grammar": "The grammar",
}

# Whitespace between JSON tokens: nothing, one space, or a line break with indentation. Without a limit, a model could
# generate whitespace forever.
WHITESPACE = r"\x20?|\x0D?\x0A[\x20\x09]{0,20}"
OPTIONS = {"whitespace_pattern": WHITESPACE}

# Markers that are matched by id if the tokenizer has a token of this name, special or not.
MARKERS = frozenset(
    {
        *(marker for row in TOOL_CALL_FORMATS for marker in row.markers),
        *(text for row in REASONING_FORMATS for text in (row.begin, row.end)),
        *(text for row in REASONING_FORMATS for pair in row.wrappers for text in pair),
        # gpt-oss writes its reasoning and its tool calls as messages of the same format
        *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
        *(text for pair in CONTENT_WRAPPERS for text in pair),
        "<|channel>",
    }
)
MAX_ELEMENT_LEVELS = 4  # levels of nested parameters; lists and objects below are written as JSON
MAX_LEVELS = 32  # levels of a schema without references in tool calls that are not written as JSON
HARMONY_REASONING = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
HARMONY_FINAL = "<|channel|>final<|message|>"

_LARK_TOKENS = re.compile(r'"(?:\\.|[^"\\\n])*+"?|/(?:\\.|[^/\\\n])++/?|//[^\n]*|#[^\n]*|<[^<>\s\[\]]+>')


class Grammar(NamedTuple):
    """Grammar of the content of a completion.

    - `kind`: `"json"`, `"regex"`, `"choice"` or `"grammar"`.
    - `content`: the JSON Schema as text, the regular expression (of Rust's crate `regex`, without look-around), the
        allowed texts, or the grammar in llguidance's dialect of Lark.
    """

    kind: Kind
    content: str | tuple[str, ...]

    @property
    def label(self) -> str:
        """Name of the grammar in error messages."""
        return LABELS[self.kind]


ANY_OBJECT = Grammar("json", '{"type": "object"}')


class CallGrammar(NamedTuple):
    """Tool calls that a completion may or must contain.

    - `format`: name of the tool-call format (see `TOOL_CALL_FORMATS`).
    - `tools`: for each tool that may be called, its name and the JSON Schema of its arguments as text.
    - `required`: the completion must consist of at least one call.
    - `max_calls`: maximum number of calls; None: unlimited.
    """

    format: ToolFormatName
    tools: tuple[tuple[str, str], ...]
    required: bool
    max_calls: int | None = None


def call_grammar(
    format: ToolFormatName, tools: Sequence[Mapping[str, Any]], *, required: bool, max_calls: int | None = None
) -> CallGrammar:
    """Return the grammar of calls to the given tools.

    If `required`, the arguments follow each tool's schema as far as the format can express it. Otherwise, formats with
    JSON arguments accept any object, and the other formats constrain only the names, order and types of parameters.
    """
    budget = VisitBudget()
    as_json = TOOL_CALL_FORMATS_BY_NAME[format].syntax in ("json", "named_json", "harmony")
    schemas = dict[str, str]()
    for function in iter_functions(tools):
        schema = function.get("parameters")
        if not isinstance(schema, dict):
            schema = {"type": "object", "properties": {}, "additionalProperties": False}
        elif not required:
            schema = {"type": "object"} if as_json else _types_only(schema, budget)
        elif "type" not in schema or (isinstance(schema["type"], list) and "object" in schema["type"]):
            schema = {**schema, "type": "object"}
        schemas[str(function["name"])] = json.dumps(schema, ensure_ascii=False)
    return CallGrammar(format, tuple(schemas.items()), required, max_calls)


def _types_only(schema: Mapping[str, Any], budget: VisitBudget) -> dict[str, Any]:
    """Return a schema with the names and types of the parameters; `{"type": "object"}` if they cannot be determined."""
    reader = SchemaReader(schema, budget)
    try:
        alternatives = reader.alternatives(prepare_schema(schema))
        types = dict[str, frozenset[str]]()
        for arguments in alternatives:
            for name, inner in arguments.properties.items():
                types[name] = types.get(name, frozenset()) | reader.types(inner)
    except ConfigError:
        return {"type": "object"}
    if not alternatives:
        return {"type": "object"}
    required = frozenset.intersection(*(arguments.required for arguments in alternatives))
    return {
        "type": "object",
        "properties": {name: {"type": sorted(names or ALL_TYPES)} for name, names in types.items()},
        "required": sorted(required),
        "additionalProperties": any(arguments.additional is not False for arguments in alternatives),
    }


class ReasoningGrammar(NamedTuple):
    """Reasoning before a completion.

    - `begin`, `end`: markers around the reasoning.
    - `opened`: the prompt ends with `begin`, so the completion starts inside the reasoning. Otherwise the reasoning is
        optional.
    """

    begin: str
    end: str
    opened: bool


class CompletionGrammar(NamedTuple):
    """Grammar of the completion to a conversation.

    - `form`: required form of the final completion; None: free text, unless tool calls are required.
    - `calls`: tool calls that may replace the form, or follow free text; None: no tool calls.
    - `reasoning`: reasoning before the completion; None: no reasoning.
    - `wrappers`: pairs of optional markers around the completion.
    - `harmony`: the completion consists of messages in the format of gpt-oss.
    """

    form: Grammar | None = None
    calls: CallGrammar | None = None
    reasoning: ReasoningGrammar | None = None
    wrappers: tuple[tuple[str, str], ...] = ()
    harmony: bool = False

    @property
    def label(self) -> str:
        """Name of the grammar in error messages."""
        if self.form is None:
            return "The grammar of tool calls"
        return self.form.label if self.calls is None else f"{self.form.label} with tool calls"

    @property
    def schemas(self) -> list[tuple[str | None, Any]]:
        """Pairs of a tool's name and the JSON Schema of its arguments. The schema of the form has the name None."""
        schemas = list[tuple[str | None, Any]]()
        if self.form is not None and self.form.kind == "json":
            schemas.append((None, json.loads(str(self.form.content))))
        if self.calls is not None:
            schemas += [(name, json.loads(schema)) for name, schema in self.calls.tools]
        return schemas

    @property
    def size(self) -> int:
        """Number of characters in the form and in the tools, which are sent by clients."""
        length = 0 if self.form is None else sum(map(len, self.form.content))
        tools = () if self.calls is None else self.calls.tools
        return length + sum(len(name) + len(schema) for name, schema in tools)

    @property
    def end_marker(self) -> str:
        """Marker that ends the reasoning; empty if there is no reasoning."""
        if self.harmony:
            return HARMONY_REASONING[1]
        return "" if self.reasoning is None else self.reasoning.end

    @property
    def begin_marker(self) -> str:
        """Marker that starts the reasoning; empty if there is no reasoning, or if the prompt ends with the marker."""
        if self.harmony:
            return HARMONY_REASONING[0]
        return "" if self.reasoning is None or self.reasoning.opened else self.reasoning.begin


def chat_grammar(
    template: str, prompt_end: str, form: Grammar | None, calls: CallGrammar | None
) -> CompletionGrammar | Grammar | None:
    """Return the grammar of the completion to a conversation; None for a completion without constraints.

    **Arguments:**

    - `template`: source of the chat template, which determines the reasoning markers.
    - `prompt_end`: last characters of the prompt. They show whether the prompt opens the reasoning, or closes it.
    - `form`: required form of the final completion, after any reasoning.
    - `calls`: constrained tool calls.
    """
    if form is None and calls is None:
        return None
    if calls is not None and calls.required:
        form = None
    if tool_format_or_default(template) == "harmony" or (calls is not None and calls.format == "harmony"):
        return CompletionGrammar(form, calls and calls._replace(format="harmony"), harmony=True)
    row = find_reasoning_format(template)
    if row is None:
        return form if calls is None else CompletionGrammar(form, calls)
    end = prompt_end.rstrip()
    closed = end.endswith(row.end)
    reasoning = None if closed else ReasoningGrammar(row.begin, row.end, end.endswith(row.begin))
    return CompletionGrammar(form, calls, reasoning, tuple(row.wrappers))


def simplify_choice(grammar: CompletionGrammar, control: Mapping[str, int]) -> CompletionGrammar:
    """Remove reasoning and tool calls from the grammar of a choice if they are pointless or ambiguous.

    - With a single allowed text, reasoning cannot change the completion: optional reasoning and calls are removed.
    - If an allowed text contains a reasoning marker that is not a token of the tokenizer, the texts are complete
        outputs, which may include reasoning: reasoning and calls are removed.

    Other grammars are returned unchanged. `control`: ids of the control tokens by name.
    """
    form = grammar.form
    if form is None or not isinstance(form.content, tuple):
        return grammar
    row = grammar.reasoning
    markers = ("<|message|>",) if grammar.harmony else () if row is None else (row.begin, row.end)
    markers = tuple(marker for marker in markers if marker not in control)
    if any(marker in text for text in form.content for marker in markers):
        return CompletionGrammar(form)
    if len(form.content) == 1:
        return grammar._replace(calls=None, reasoning=row if row is not None and row.opened else None)
    return grammar


@contextlib.contextmanager
def errors_of_tool(name: str | None) -> Iterator[None]:
    """Add the name of a tool to errors about the JSON Schema of its parameters. If `name` is None, add nothing."""
    try:
        yield
    except ConfigError as error:
        if name is None:
            raise
        raise ConfigError(f"Parameters of the function {shown(name)}: {error}") from error


def with_prepared_schemas(grammar: CompletionGrammar) -> CompletionGrammar:
    """Return a grammar whose JSON Schemas are prepared for llguidance (see `prepare_schema`).

    Raises ConfigError for schemas that are invalid or not supported.
    """
    form, calls = grammar.form, grammar.calls
    if form is not None and form.kind == "json":
        form = form._replace(content=json.dumps(prepare_schema(_parse(str(form.content), form.label))))
    if calls is not None:
        tools = list[tuple[str, str]]()
        for name, schema in calls.tools:
            with errors_of_tool(name):
                tools.append((name, json.dumps(prepare_schema(json.loads(schema)))))
        calls = calls._replace(tools=tuple(tools))
    return grammar._replace(form=form, calls=calls)


def to_llguidance(
    grammar: CompletionGrammar,
    control: Mapping[str, int],
    stop_ids: Sequence[int] = (),
    *,
    reasoning_ends: bool = False,
) -> str:
    """Return a grammar in llguidance's JSON format.

    **Arguments:**

    - `grammar`: grammar with prepared JSON Schemas (see `with_prepared_schemas`).
    - `control`: ids of the control tokens by name.
    - `stop_ids`: ids of the tokens that end the completion. The grammar omits them at the end of a call.
    - `reasoning_ends`: start with the end marker of the reasoning instead of the reasoning.

    Raises ConfigError for schemas that the format of the tool calls cannot express.
    """
    if grammar.form is not None and grammar == CompletionGrammar(grammar.form):
        return _dump(_form(grammar.form, control))
    writer = _Writer(control, stop_ids)
    return _dump([{"lark_grammar": writer.completion(grammar, reasoning_ends)}, *writer.grammars])


def without_forcing(source: str) -> str:
    """Return a grammar that llguidance matches token by token.

    By default, llguidance tokenizes text that the grammar forces. This fails if the tokenizer changes the text: a
    normalizer may change any text, and SentencePiece changes the character U+2581.
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
    """Return a form as llguidance grammars. The first grammar is the start grammar, and may refer to the others."""
    if isinstance(form.content, tuple):
        return [{"lark_grammar": "start: " + " | ".join(quoted(text) for text in form.content)}]
    if form.kind == "json":
        return [{"json_schema": _with_options(json.loads(form.content))}]
    if form.kind == "regex":
        return [{"lark_grammar": f"start: /{_escaped_slashes(form.content)}/"}]
    if form.content.lstrip().startswith("{"):  # several grammars, in llguidance's JSON
        content = _parse(form.content, form.label)
        grammars = content.get("grammars")
        if not isinstance(grammars, list) or not grammars or not all(isinstance(item, dict) for item in grammars):
            raise ConfigError("Invalid grammar: expected Lark, or a JSON object with `grammars`, a list of objects.")
        return [
            {**item, "lark_grammar": with_token_ids(item["lark_grammar"], control)}
            if isinstance(item.get("lark_grammar"), str)
            else item
            for item in grammars
        ]
    return [{"lark_grammar": with_token_ids(form.content, control)}]


def _parse(text: str, label: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{label} is not valid JSON: {error}.") from error


def _with_options(schema: Any) -> Any:
    return {**schema, "x-guidance": OPTIONS} if isinstance(schema, dict) else schema


def _escaped_slashes(regex: str) -> str:
    return re.sub(r"\\.|/|\n", lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), regex, flags=re.DOTALL)


def _regex_of(text: str) -> str:
    """Return a regular expression in Lark syntax that matches exactly this text."""
    return "".join(r"\n" if char == "\n" else _escaped_slashes(re.escape(char)) for char in text)


def with_token_ids(lark: str, control: Mapping[str, int]) -> str:
    """Replace the names of control tokens, `<name>`, in a Lark grammar by their ids, `<[id]>`.

    Literals, regular expressions and comments are not changed.
    """

    def replace(match: re.Match[str]) -> str:
        return f"<[{control[match[0]]}]>" if match[0] in control else match[0]

    return _LARK_TOKENS.sub(replace, lark)


def quoted(text: str) -> str:
    """Return text as a Lark string literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # llguidance requires this escape


class _Writer:
    """Writer of the Lark rules of one completion."""

    def __init__(self, control: Mapping[str, int], stop_ids: Sequence[int]):
        self._control, self._stop_ids = control, frozenset(stop_ids)
        self._budget = VisitBudget()
        names = sorted((name for name in control if name in MARKERS), key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, names))) if names else None
        self._rules: dict[str, str] = {}  # options and body of each rule, by the rule's name
        self._names: dict[tuple[str, bool], str] = {}  # name of each rule, by its body and whether it is a terminal
        self.grammars: list[dict[str, Any]] = []

    def completion(self, grammar: CompletionGrammar, reasoning_ends: bool) -> str:
        body = self._harmony(grammar, reasoning_ends) if grammar.harmony else self._plain(grammar, reasoning_ends)
        return "\n".join([f"start: {body}", *(f"{name}{rule}" for name, rule in self._rules.items())])

    def _plain(self, grammar: CompletionGrammar, reasoning_ends: bool) -> str:
        completion = self._wrapped(self.completion_rule(grammar), grammar.wrappers)
        reasoning = grammar.reasoning
        if reasoning is None or self._stop_ids & set(self.split_markers(reasoning.end)):
            return completion
        newlines = self.rule("newlines", r"/\n{0,2}/")
        if reasoning_ends:
            return f"{self.text(reasoning.end)} {newlines} {completion}"
        rest = f"{self.text_until(reasoning.end)} {newlines}"
        if reasoning.opened:
            return f"{rest} {completion}"
        return f"({self.text(reasoning.begin)} {rest})? {completion}"

    def _harmony(self, grammar: CompletionGrammar, reasoning_ends: bool) -> str:
        begin, end = HARMONY_REASONING
        alternatives = []
        calls = grammar.calls
        if calls is not None:
            alternatives.append(self._calls(calls, skip="<|start|>assistant"))
        if calls is None or not calls.required:
            alternatives.append(f"{self.text(HARMONY_FINAL)} {self._content(grammar.form)}")
        completion = self.rule("completion", " | ".join(alternatives))
        if self._stop_ids & set(self.split_markers(end)):  # the end of the reasoning would end the completion
            return completion
        if reasoning_ends:
            return f"{self.text(end)} {completion}"
        return f"({self.text(begin)} {self.text_until(end)})? {completion}"

    def _wrapped(self, completion: str, wrappers: Sequence[tuple[str, str]]) -> str:
        for begin, end in wrappers:
            completion = self.rule(
                "wrapped", f"{completion} | {self.text(begin)} /\\n?/ {completion} /\\n?/ {self.text(end)}"
            )
        return completion

    def completion_rule(self, grammar: CompletionGrammar) -> str:
        """Return the rule of the completion after its reasoning."""
        form, calls = grammar.form, grammar.calls
        if calls is None:
            return self._content(form)
        if calls.required:
            return self._calls(calls)
        row = TOOL_CALL_FORMATS_BY_NAME[calls.format]
        if form is None:
            return self.rule("completion", self._text_or_calls(row, calls))
        return self.rule("completion", f"{self._calls_instead_of(form, row, calls)} | {self._content(form)}")

    def _calls_instead_of(self, form: Grammar, row: ToolCallFormat, calls: CallGrammar) -> str:
        """Return the rule of tool calls that are an alternative to a form.

        If the calls have no start marker, the rule is written so that llguidance can distinguish them from the form.
        """
        if not row.marker_optional or self._start_marker(row):
            return self._calls(calls)
        if form.kind != "json":
            return f"{self.text(row.start_markers[0])} {self._calls(calls)}"
        if row.syntax != "json":
            return self._calls(calls)
        # llguidance can choose between several JSON Schemas, but not between a JSON Schema and a literal
        argument_key = next(key for key in row.argument_keys if f'"{key}"' in row.name_end)
        schemas = []
        for name, text in calls.tools:
            properties = {row.name_keys[0]: {"const": name}, argument_key: json.loads(text)}
            required = list(properties)
            schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
            schemas.append(schema)
        if row.section_begin == "[":
            limit = {} if calls.max_calls is None else {"maxItems": calls.max_calls}
            schemas = [{"type": "array", "items": {"anyOf": schemas}, "minItems": 1, **limit}]
        return " | ".join(f"%json {json.dumps(_with_options(schema), ensure_ascii=False)}" for schema in schemas)

    def _content(self, form: Grammar | None) -> str:
        """Return the rule of a completion without tool calls. The grammars of the form are added to `grammars`."""
        if form is None:
            return self._free_text()
        first, *others = _form(form, self._control)
        self.grammars += [{**first, "name": "completion"}, *others]
        return "@completion"

    # --- text ---------------------------------------------------------------------------------------------------------

    def rule(self, name: str, body: str, options: str = "") -> str:
        """Return the name of a rule. The rule is added unless an equal rule exists."""
        rule = f"{options}: {body}"
        known = self._names.get((rule, name.isupper()))  # names of terminals are in upper case
        if known is not None:
            return known
        name = self.reserve_rule(name)
        self._rules[name] = rule
        self._names[rule, name.isupper()] = name
        return name

    def reserve_rule(self, name: str) -> str:
        """Return the name of a new rule. A recursive rule needs its name before its body: see `define_rule`."""
        name = f"{name}_{len(self._rules)}"
        self._rules[name] = ""
        return name

    def define_rule(self, name: str, body: str) -> None:
        """Set the body of a rule whose name is reserved."""
        self._rules[name] = f": {body}"

    def _terminal(self, body: str) -> str:
        return self.rule("TEXT", body)

    def _free_text(self) -> str:
        return self.rule("text", "/(?s:.*)/")

    def split_markers(self, text: str) -> list[str | int]:
        """Split text into literals and the ids of control tokens."""
        pieces, start = list[str | int](), 0
        for match in self._marker.finditer(text) if self._marker is not None else ():
            pieces += [text[start : match.start()], self._control[match[0]]]
            start = match.end()
        return [piece for piece in (*pieces, text[start:]) if piece != ""]

    def text(self, text: str) -> str:
        """Return the elements of a rule that match a text with markers. `{index}` matches a number of 1 to 3 digits."""
        elements = []
        for piece in self.split_markers(text):
            if isinstance(piece, int):
                elements.append(f"<[{piece}]>")
            else:
                head, *tails = piece.split("{index}")
                elements += [quoted(head)] if head else []
                for tail in tails:
                    elements += ["/[0-9]{1,3}/", *([quoted(tail)] if tail else [])]
        return " ".join(elements)

    def text_until(self, end: str) -> str:
        """Return the elements of a rule that match any text up to the first `end`, and the `end`."""
        pieces = self.split_markers(end)
        index = next((index for index, piece in enumerate(pieces) if isinstance(piece, int)), None)
        if index is None:
            return self.rule("until", f"/(?s:.*)/ {quoted(end)}", "[lazy]")
        literals = "".join(str(piece) for piece in pieces[:index])
        before = f"/(?s:.*)/ {quoted(literals)}" if literals else "/(?s:.*)/"
        rest = "".join(self._text_of(piece) for piece in pieces[index:])
        return f"{self._terminal(before)} {self.text(rest)}"

    def _text_of(self, piece: str | int) -> str:
        if isinstance(piece, str):
            return piece
        return next(name for name, token in self._control.items() if token == piece)

    def _without_stop_tokens(self, text: str) -> str:
        """Remove the stop tokens at the end of a text with markers."""
        pieces = self.split_markers(text)
        while pieces and pieces[-1] in self._stop_ids:
            pieces.pop()
        return "".join(map(self._text_of, pieces))

    # --- calls --------------------------------------------------------------------------------------------------------

    def _start_marker(self, row: ToolCallFormat) -> str:
        """Return the marker that starts the calls of a format; empty if the calls have no start marker."""
        written = row.section_begin + row.call_begin
        return next((marker for marker in row.start_markers if written.startswith(marker)), "")

    def _text_or_calls(self, row: ToolCallFormat, calls: CallGrammar) -> str:
        """Return the body of a rule: free text that contains no start of a call, or text followed by calls."""
        marker = self._start_marker(row)
        if not marker:  # calls without a marker are a complete completion
            first = (row.section_begin + row.call_begin)[:1]
            text = self._terminal(f'/[^{re.escape(first)}](?s:.*)/ & {self._text_without(row.start_markers)} | ""')
            return f"{self._calls(calls)} | {text}"
        other_markers = [begin for begin in row.start_markers if begin != marker]
        text = self._terminal(self._text_without(other_markers))
        if any(isinstance(piece, int) for piece in self.split_markers(marker)):
            head = self.text_until(marker)
        else:  # lazy: the text ends with the first marker
            head = self.rule("head", f"{text} {quoted(marker)}", "[lazy]")
        return f"{text} | {head} {self._calls(calls, skip=marker)}"

    def _text_without(self, texts: Sequence[str]) -> str:
        """Return the body of a terminal that matches any text in which none of `texts` occurs."""
        excluded = "".join(
            f" & ~/(?s:.*){_escaped_slashes(re.escape(text))}(?s:.*)/"
            for text in texts
            if all(isinstance(piece, str) for piece in self.split_markers(text))
        )
        return f"/(?s:.*)/{excluded}"

    def _calls(self, calls: CallGrammar, skip: str = "") -> str:
        """Return the rule of a list of calls. `skip`: start marker that is matched before this rule."""
        row = TOOL_CALL_FORMATS_BY_NAME[calls.format]
        arguments = list[tuple[str, str]]()
        for name, schema in calls.tools:
            with errors_of_tool(name):
                arguments.append((name, self._arguments(row, json.loads(schema))))
        begin = row.call_begin if row.section_begin else row.call_begin.removeprefix(skip)
        first = self._call(row, begin, arguments)
        elements = [self.text(row.section_begin.removeprefix(skip)), first]
        if calls.max_calls is None:
            following = self._call(row, row.separator + row.call_begin, arguments)
            elements.append(f"({following})*")
        elif calls.max_calls > 1:
            following = self._call(row, row.separator + row.call_begin, arguments)
            elements.append(f"({following}){{0,{calls.max_calls - 1}}}")
        elements.append(self.text(self._without_stop_tokens(row.section_end)))
        return self.rule("calls", " ".join(element for element in elements if element))

    def _call(self, row: ToolCallFormat, begin: str, arguments: Sequence[tuple[str, str]]) -> str:
        end = row.call_end if row.section_end else self._without_stop_tokens(row.call_end)
        alternatives = []
        for name, body in arguments:
            alternatives.append(f"{self.text(begin + name + row.name_end)} {body} {self.text(end)}".strip())
        return self.rule("call", " | ".join(alternatives))

    def _arguments(self, row: ToolCallFormat, schema: Any) -> str:
        reader = SchemaReader(schema, self._budget)
        allows_object = isinstance(schema, dict) and "object" in reader.types(schema)
        if allows_object and row.syntax in ("json", "named_json", "harmony"):
            return f"%json {json.dumps(_with_options(schema), ensure_ascii=False)}"
        alternatives = reader.alternatives(schema) if allows_object else []
        if not alternatives:
            raise ConfigError("Invalid JSON Schema: the schema must allow an object. Set `type` to `object`.")
        values = _Values(row, reader, self)
        bodies = [self._argument_list(row, arguments, reader, values) for arguments in alternatives]
        return self.rule("arguments", " | ".join(dict.fromkeys(bodies)))

    def _argument_list(self, row: ToolCallFormat, arguments: Arguments, reader: SchemaReader, values: "_Values") -> str:
        if row.syntax != "xml":
            return self.members(arguments, "", *(("=", ", ") if row.syntax == "python" else (":", ",")), values, 0)
        if arguments.additional is not False and "{key}" in row.parameter_end:
            if arguments.additional is not True:
                raise ConfigError(
                    f"additionalProperties={shown(arguments.additional)} is not supported for tool calls in "
                    f"the format {row.name}. Declare the parameters in `properties`."
                )
            arguments = arguments._replace(additional=False)
        items = [
            (
                lambda before, key=key, inner=inner: self._parameter(row, key, inner, reader, before),
                key in arguments.required,
            )
            for key, inner in arguments.properties.items()
        ]

        def additional(before: str) -> str:
            return self._parameter(row, None, arguments.additional, reader, before, list(arguments.properties))

        is_open = arguments.additional is not False
        return self.ordered(items, row.parameter_separator, additional if is_open else None)

    def members(
        self, arguments: Arguments, quote: str, key_end: str, separator: str, values: "_Values", depth: int
    ) -> str:
        """Return the rule of the keys and values in a call, or in an object.

        **Arguments:**

        - `quote`: quotation mark around keys; empty: keys are not quoted.
        - `key_end`: text between a key and its value.
        - `separator`: text between a value and the next key.
        - `values`: writer of the values.
        - `depth`: number of objects and lists around the members.
        """

        def member(before: str, key: str, inner: Any) -> str:
            name = json.dumps(key, ensure_ascii=False) if quote else key
            return f"{quoted(before + name + key_end)} {values.value_rule(inner, depth + 1)}"

        items = [
            (lambda before, key=key, inner=inner: member(before, key, inner), key in arguments.required)
            for key, inner in arguments.properties.items()
        ]

        def additional(before: str) -> str:
            schema = arguments.additional if isinstance(arguments.additional, dict) else {}
            name = self._undeclared_name(before + quote, list(arguments.properties), quote + key_end, bool(quote))
            return f"{name} {values.value_rule(schema, depth + 1)}"

        return self.ordered(items, separator, None if arguments.additional is False else additional)

    def _undeclared_name(self, before: str, declared: Sequence[str], after: str, any_name: bool = False) -> str:
        """Return the elements of a rule that match `before`, a name that is not in `declared`, and `after`.

        The name and the literals next to it are one terminal. `any_name`: the name need not be an identifier.
        """
        head, tail = self.split_markers(before), self.split_markers(after)
        start = head.pop() if head and isinstance(head[-1], str) else ""
        end = tail.pop(0) if tail and isinstance(tail[0], str) else ""
        pattern = r'[^"\\\x00-\x1F\x7F]{1,64}' if any_name else "[A-Za-z_][A-Za-z0-9_.-]{0,63}"
        start, end = map(_regex_of, (str(start), str(end)))
        names = "|".join(map(_regex_of, declared))
        excluded = f" & ~/{start}({names}){end}/" if declared else ""
        key = self._terminal(f"/{start}{pattern}{end}/{excluded}")
        pieces = [*(f"<[{piece}]>" if isinstance(piece, int) else quoted(piece) for piece in head), key]
        return " ".join([*pieces, *(f"<[{piece}]>" if isinstance(piece, int) else quoted(piece) for piece in tail)])

    def ordered(
        self,
        items: Sequence[tuple[Callable[[str], str], bool]],
        separator: str,
        additional: Callable[[str], str] | None = None,
    ) -> str:
        """Return the rule of a sequence of items with separators between them.

        **Arguments:**

        - `items`: for each item, a function from the text before the item to the elements of a rule, and whether the
            item is required. The text before the item and the start of the item become one literal, because llguidance
            cannot choose between two literals if one literal is a prefix of the other.
        - `additional`: the same function for additional items, which may follow in any number; None: no additional
            items.
        """
        first = following = '""'
        if additional is not None:
            following = self.rule("items", f"({additional(separator)})*")
            first = self.rule("items", f"({additional('')} {following})?")
        for item, required in reversed(items):
            after = following
            if required:
                following, first = f"{item(separator)} {after}", f"{item('')} {after}"
            else:
                following, first = f"({item(separator)})? {after}", f"({item('')} {after} | {first})"
            following, first = self.rule("items", following), self.rule("items", first)
        return first

    def _parameter(
        self,
        row: ToolCallFormat,
        key: str | None,
        schema: Any,
        reader: SchemaReader,
        before: str,
        declared: Sequence[str] = (),
        depth: int = 0,
    ) -> str:
        """Return the rule of one parameter in an XML format.

        **Arguments:**

        - `key`: name of the parameter; None: any name that is not in `declared`.
        - `schema`: JSON Schema of the value. `reader`: reader of the JSON Schema that contains `schema`.
        - `before`: text before the parameter.
        - `depth`: number of parameters around the parameter.
        """
        schema = {} if schema is True else schema
        types, root = reader.types(schema), reader.root
        texts, literals = reader.text_literals(schema), reader.literals(schema)
        begin, end = before + row.parameter_begin, row.parameter_end.replace("{key}", key or "")

        def head(is_text: bool) -> str:
            key_end = row.key_end.replace("{string}", "true" if is_text else "false")
            return self._undeclared_name(begin, declared, key_end) if key is None else self.text(begin + key + key_end)

        other_values = None
        if types != {"string"} and literals is not None:
            written = [json.dumps(value, ensure_ascii=False) for value in literals if not isinstance(value, str)]
            if written:
                other_values = f"({' | '.join(map(quoted, written))}) {self.text(end)}"
        elif (elements := self._elements(row, schema, reader, types, depth)) is not None:
            other_values = f"{elements} {self.text(end)}"
        elif types != {"string"}:
            definitions = {name: root[name] for name in ("$defs", "definitions", "$schema") if name in root}
            inner: dict[str, Any] = {**definitions, **schema}
            if "string" in types:
                inner = {**definitions, "allOf": [schema, {"type": sorted(types - {"string"})}]}
            other_values = f"%json {json.dumps(_with_options(inner), ensure_ascii=False)} {self.text(end)}"
        strings = None
        if "string" in types and texts is None:
            strings = self.text_until(end)
            if "{string}" not in row.key_end:
                other_values = None  # any text is allowed, which includes all other values
        elif texts:
            strings = f"({' | '.join(map(quoted, texts))}) {self.text(end)}"
        bodies = [f"{head(body is strings)} {body}" for body in (strings, other_values) if body is not None]
        if not bodies:
            raise ConfigError(f"Invalid JSON Schema: no value matches {shown(schema)}.")
        return self.rule("parameter", " | ".join(bodies))

    def _elements(
        self, row: ToolCallFormat, schema: Any, reader: SchemaReader, types: Collection[str], depth: int
    ) -> str | None:
        """Return the rule of the members of a list or an object in a format with nested parameters.

        Returns None for other formats and for schemas that do not declare the members. These values are JSON.
        """
        if not row.nested or depth >= MAX_ELEMENT_LEVELS:
            return None
        schema = reader.merged(schema)
        if not isinstance(schema, dict):
            return None
        if types == {"array"} and isinstance(schema.get("items"), dict) and not schema.get("prefixItems"):
            item = self._parameter(row, "item", schema["items"], reader, "", depth=depth + 1)
            return self.rule("elements", f"({item}){{{schema.get('minItems', 0)},{schema.get('maxItems', '')}}}")
        try:
            alternatives = reader.alternatives(schema) if types == {"object"} else []
        except ConfigError:  # JSON can express more schemas
            return None
        is_declared = all(item.properties and isinstance(item.additional, bool) for item in alternatives)
        if not alternatives or not is_declared:
            return None
        bodies = []
        for arguments in alternatives:
            items = [
                (
                    lambda before, key=key, inner=inner: self._parameter(
                        row, key, inner, reader, before, depth=depth + 1
                    ),
                    key in arguments.required,
                )
                for key, inner in arguments.properties.items()
            ]
            bodies.append(self.ordered(items, ""))
        return self.rule("elements", " | ".join(dict.fromkeys(bodies)))


def _only_reference(schema: Any) -> str | None:
    """Return the `$ref` of a schema that has no other rules. The `$ref` may be the only schema of `allOf`."""
    rules = {name: value for name, value in schema.items() if name in RULES} if isinstance(schema, dict) else {}
    if len(rules) != 1:
        return None
    if isinstance(rules.get("allOf"), list) and len(rules["allOf"]) == 1:
        return _only_reference(rules["allOf"][0])
    reference = rules.get("$ref")
    return reference if isinstance(reference, str) else None


class _Values:
    """Writer of the rules of argument values in Python's syntax and in Gemma's syntax.

    The rules constrain types, `const`, `enum`, properties, the number of items, and numbers. Strings are constrained
    (for example by `pattern`) in Python's syntax only.

    A `$ref` becomes a rule, so that schemas may be recursive.
    """

    def __init__(self, row: ToolCallFormat, reader: SchemaReader, writer: _Writer):
        self._row, self._reader, self._writer = row, reader, writer
        self._python = row.syntax == "python"
        self._names = ("True", "False", "None") if self._python else ("true", "false", "null")
        self._separator = quoted(", " if self._python else ",")
        self._references: dict[str, str] = {}  # name of the rule of each `$ref`
        self._any_rule = ""  # name of the rule of any value

    def value_rule(self, schema: Any, depth: int = 0) -> str:
        """Return the rule that matches the values of a JSON Schema."""
        if schema is True or (isinstance(schema, dict) and not RULES & schema.keys()):
            return self._any()
        reference = _only_reference(schema)
        if reference is None:
            return self._value_rule(schema, depth)
        if reference not in self._references:
            name = self._references[reference] = self._writer.reserve_rule("reference")
            self._writer.define_rule(name, self._value_rule({"$ref": reference}, 0))
        return self._references[reference]

    def _value_rule(self, schema: Any, depth: int) -> str:
        if depth > MAX_LEVELS:
            raise ConfigError(
                f"The JSON Schema is not supported: it has more than {MAX_LEVELS} levels of lists, objects and "
                "compositions. Move inner schemas to `$defs`."
            )
        schema = self._reader.merged(schema)
        schema = schema if isinstance(schema, dict) else {}
        types = self._reader.types(schema)
        literals = self._reader.literals(schema)
        if literals is not None:
            literals = [value for value in literals if type_of(value) in types]
            if not literals:
                raise ConfigError(f"Invalid JSON Schema: no value matches {shown(schema)}.")
            return self._writer.rule("value", " | ".join(self._literal(value) for value in literals))
        true, false, null = map(quoted, self._names)
        keyword = next((keyword for keyword in ("anyOf", "oneOf") if schema.get(keyword)), None)
        if keyword is not None:
            base = {name: value for name, value in schema.items() if name != keyword and name in RULES}
            parts = [[base, option] if base else [option] for option in schema[keyword]]
            options = [self.value_rule({"allOf": part}, depth + 1) for part in parts]
            return self._writer.rule("value", " | ".join(dict.fromkeys(options)))
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
            items = schema.get("items", True)
            if schema.get("prefixItems") or isinstance(items, list):
                raise ConfigError(
                    f"prefixItems is not supported for tool calls in the format {self._row.name}. Use `items` instead."
                )
            if "array" in types and items is False:
                alternatives.append('"[" "]"')
            elif "array" in types:
                alternatives.append(self._array(self.value_rule(items, depth + 1), schema))
            if "object" in types:
                alternatives.append(self._object(schema, depth))
        if not alternatives:
            raise ConfigError(f"Invalid JSON Schema: no value matches {shown(schema)}.")
        return self._writer.rule("value", " | ".join(alternatives))

    def _as_json(self, kind: str, rules: Sequence[str], schema: Any) -> str:
        """Return the rule of numbers or strings, which are written as in JSON."""
        constraints = {rule: schema[rule] for rule in (*rules, "allOf") if rule in schema}
        return self._writer.rule(
            "value", f"%json {json.dumps(_with_options({'type': kind, **constraints}), ensure_ascii=False)}"
        )

    def _array(self, item: str, schema: Mapping[str, Any]) -> str:
        minimum, maximum = schema.get("minItems", 0), schema.get("maxItems")
        if maximum == 0:
            return '"[" "]"'
        more = f"({self._separator} {item}){{{max(0, minimum - 1)},{'' if maximum is None else maximum - 1}}}"
        more = "" if maximum == 1 else more
        return f'"[" {item} {more} "]"' if minimum else f'"[" ({item} {more})? "]"'

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        quote, sign, separator = ('"', ": ", ", ") if self._python else ("", ":", ",")
        bodies = [
            self._writer.members(arguments, quote, sign, separator, self, depth)
            for arguments in self._reader.alternatives(schema)
        ]
        if not bodies:
            raise ConfigError(f"Invalid JSON Schema: no value matches {shown(schema)}.")
        return f'"{{" ({" | ".join(bodies)}) "}}"'

    def _any(self) -> str:
        """Return the rule of any value."""
        if not self._any_rule:
            name = self._any_rule = self._writer.reserve_rule("any")
            scalars = self._value_rule({"type": ["string", "number", "boolean", "null"]}, 0)
            member = f"{self._key()} {name}"
            array = f'"[" ({name} ({self._separator} {name})*)? "]"'
            items = f'"{{" ({member} ({self._separator} {member})*)? "}}"'
            self._writer.define_rule(name, f"{scalars} | {array} | {items}")
        return self._any_rule

    def _string(self) -> str:
        if self._python:
            return r'/"([^"\\\x00-\x1F\x7F]|\\["\\nrt])*"/'
        return f"{self._writer.text(self._row.quote)} {self._writer.text_until(self._row.quote)}"

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
                f"enum and const of lists and objects are not supported for tool calls in the format {self._row.name}. "
                f"Remove {shown(value)}."
            )
        return quoted(json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value))
