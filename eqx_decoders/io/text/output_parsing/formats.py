"""Tables of the formats in which models write their reasoning and tool calls.

`TOOL_CALL_FORMATS` and `REASONING_FORMATS` list the formats of the supported models. `parse_tool_calls` and the server
parse model outputs in these formats. Constrained decoding builds its grammars from them. The formats of a model are
selected by the markers in its chat template.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple


ToolFormatName = Literal[
    "hermes",
    "llama3_json",
    "mistral",
    "mistral_v11",
    "qwen3_coder",
    "harmony",
    "glm4_moe",
    "glm47_moe",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "kimi_k2",
    "minicpm5",
    "minimax_m1",
    "minimax_m2",
    "minimax_m3",
    "granite",
    "llama4_pythonic",
    "olmo3",
    "lfm2",
    "cohere",
    "hunyuan",
    "hy_v3",
    "hy_v3_opensource",
    "seed_oss",
    "solar_open",
    "gemma3",
    "gemma4",
    "apertus",
    "nemotron",
    "phi4_mini",
    "internlm",
    "longcat",
    "longcat_xml",
    "xlam",
]
Syntax = Literal["json", "named_json", "xml", "python", "gemma", "harmony"]


class FunctionCall(NamedTuple):
    """Tool call: the name of the tool and its arguments as JSON values."""

    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCallFormat:
    """Format of tool calls: the syntax of a call, and the markers that delimit it.

    Calls are written as

        section_begin + call_1 + separator + call_2 + … + section_end

    where a call is `call_begin + NAME + name_end + ARGUMENTS + call_end`. ARGUMENTS depends on `syntax`:

    - `"json"`: a JSON object. This object is a member of another JSON object that also contains the name of the tool.
    - `"named_json"`, `"harmony"`: a JSON object. The name of the tool precedes it.
    - `"xml"`: for each argument `parameter_begin + KEY + key_end + VALUE + parameter_end`, joined by
        `parameter_separator`. Strings are written without quotes and escape sequences. All other values are written as
        JSON (see `nested` and `character_data`).
    - `"python"`: keyword arguments of a Python call, `key="text", other=1`.
    - `"gemma"`: `key:value,other:value`. A string is enclosed in `quote`.

    Template fields in these texts: `{index}` is the index of the call, from 0. `{string}` is `true` if the value is a
    string and `false` otherwise. `{key}` in `parameter_end` is the key of the argument.

    **Arguments:**

    - `name`: name of the format, as in `--tool-call-parser`.
    - `selectors`: a chat template selects the format if the template contains all strings of at least one tuple.
    - `start_markers`: markers before calls. Each marker is a prefix of `section_begin` or `call_begin`, or a variant of
        such a prefix that some models write.
    - `end_markers`: markers that may follow a call or the last call.
    - `inner_markers`: markers within calls. These markers are special tokens in some tokenizers.
    - `id_marker`: marker before the id of a call. Some models write this id after the tool's name.
    - `name_keys`: keys of the tool's name in JSON objects. If empty, the object has a single key, the tool's name.
    - `argument_keys`: keys of the arguments in JSON objects.
    - `marker_optional`: calls may be written without a marker. Text without a marker is a call only if the tool is
        offered.
    - `nested`: the members of lists and objects are written as parameters, not as JSON (`"xml"`).
    - `character_data`: strings that contain `<`, `&` or line breaks are written as CDATA (`"xml"`).
    """

    name: ToolFormatName
    syntax: Syntax
    selectors: tuple[tuple[str, ...], ...] = ()
    start_markers: tuple[str, ...] = ()
    end_markers: tuple[str, ...] = ()
    inner_markers: tuple[str, ...] = ()
    id_marker: str = ""
    section_begin: str = ""
    section_end: str = ""
    call_begin: str = ""
    name_end: str = ""
    call_end: str = ""
    separator: str = ""
    parameter_begin: str = ""
    key_end: str = ""
    parameter_end: str = ""
    parameter_separator: str = ""
    quote: str = ""
    name_keys: tuple[str, ...] = ("name",)
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    marker_optional: bool = False
    nested: bool = False
    character_data: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers of the format. Some of these markers may be special tokens of the tokenizer."""
        texts = (*self.start_markers, *self.end_markers, *self.inner_markers, self.quote)
        return tuple(dict.fromkeys(text for text in texts if text))

    def write(self, calls: Sequence[FunctionCall]) -> str:
        """Return the text of tool calls, as the published chat templates of this format write it."""
        texts = [
            (self.call_begin + call.name + self.name_end).replace("{index}", str(index))
            + self._arguments(call.arguments)
            + self.call_end.replace("{index}", str(index))
            for index, call in enumerate(calls)
        ]
        return self.section_begin + self.separator.join(texts) + self.section_end if texts else ""

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        if self.syntax == "xml":
            return self.parameter_separator.join(self._parameter(*item) for item in arguments.items())
        if self.syntax == "python":
            return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        if self.syntax == "gemma":
            return ",".join(f"{key}:{self._gemma_value(value)}" for key, value in arguments.items())
        return json.dumps(arguments, ensure_ascii=False)

    def _parameter(self, key: str, value: Any) -> str:
        is_string = isinstance(value, str)
        key_end = self.key_end.replace("{string}", "true" if is_string else "false")
        if self.nested and isinstance(value, Mapping | list | tuple):
            members = value.items() if isinstance(value, Mapping) else [("item", member) for member in value]
            text = "".join(self._parameter(*member) for member in members)
        else:
            text = value if is_string else json.dumps(value, ensure_ascii=False)
        if self.character_data and is_string and any(character in text for character in "<&\n"):
            text = f"<![CDATA[{text}]]>"
        return self.parameter_begin + key + key_end + text + self.parameter_end.replace("{key}", key)

    def _gemma_value(self, value: Any) -> str:
        if isinstance(value, str):
            return self.quote + value + self.quote
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self._gemma_value(member)}" for key, member in value.items()) + "}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(self._gemma_value, value)) + "]"
        return json.dumps(value)


class ReasoningFormat(NamedTuple):
    """Markers of the reasoning at the start of a model output.

    **Arguments:**

    - `begin`, `end`: markers that start and end the reasoning.
    - `selectors`: a chat template that contains at least one of these strings selects the format.
    - `wrappers`: pairs of markers that enclose the content after the reasoning. The markers are not part of the
        content.
    """

    begin: str
    end: str
    selectors: tuple[str, ...]
    wrappers: tuple[tuple[str, str], ...] = ()


def _json_call(begin: str, end: str = "", *, arguments: str = "arguments") -> dict[str, Any]:
    """Return the fields of a format that writes each call as a JSON object between `begin` and `end`."""
    return dict(
        syntax="json",
        call_begin=begin + '{"name": "',
        name_end=f'", "{arguments}": ',
        call_end="}" + end,
    )


def _json_list(begin: str, end: str = "", *, arguments: str = "arguments") -> dict[str, Any]:
    """Return the fields of a format that writes all calls as a JSON list of objects between `begin` and `end`."""
    fields = _json_call("", arguments=arguments)
    return fields | dict(section_begin=f"{begin}[", section_end=f"]{end}", separator=", ")


def _deepseek(function: str, name_end: str, call_end: str, separator: str) -> dict[str, Any]:
    """Return the fields of the JSON format of DeepSeek V3. `function`: text before the name of the tool."""
    return dict(
        syntax="named_json",
        start_markers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        end_markers=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        inner_markers=("<｜tool▁sep｜>",),
        section_begin="<｜tool▁calls▁begin｜>",
        section_end="<｜tool▁calls▁end｜>",
        call_begin=f"<｜tool▁call▁begin｜>{function}",
        name_end=name_end,
        call_end=f"{call_end}<｜tool▁call▁end｜>",
        separator=separator,
    )


def _dsml(section: str) -> dict[str, Any]:
    """Return the fields of the XML format of DeepSeek V3.2 and later. `section`: name of the tag around all calls."""
    return dict(
        syntax="xml",
        start_markers=(f"<｜DSML｜{section}>", "<｜DSML｜invoke"),
        end_markers=("</｜DSML｜invoke>", f"</｜DSML｜{section}>"),
        inner_markers=("｜DSML｜",),
        section_begin=f"<｜DSML｜{section}>\n",
        section_end=f"\n</｜DSML｜{section}>",
        call_begin='<｜DSML｜invoke name="',
        name_end='">\n',
        call_end="\n</｜DSML｜invoke>",
        separator="\n",
        parameter_begin='<｜DSML｜parameter name="',
        key_end='" string="{string}">',
        parameter_end="</｜DSML｜parameter>",
        parameter_separator="\n",
    )


def _function_tags(tag: str) -> dict[str, Any]:
    """Return the fields of a format that writes calls as `<function=NAME>` within the element `tag`."""
    return dict(
        syntax="xml",
        start_markers=(f"<{tag}>", "<function="),
        end_markers=("</function>", f"</{tag}>"),
        call_begin=f"<{tag}>\n<function=",
        name_end=">\n",
        call_end=f"</function>\n</{tag}>",
        separator="\n",
        parameter_begin="<parameter=",
    )


def _key_value_tags(prefix: str = "", line_break: str = "\n") -> dict[str, Any]:
    """Return the fields of a format that writes a call as a name, and keys and values in separate tags.

    `prefix`: start of the names of all tags. `line_break`: text after the name and after each key and value.
    """
    return dict(
        syntax="xml",
        start_markers=(f"<{prefix}tool_call>",),
        end_markers=(f"</{prefix}tool_call>",),
        inner_markers=tuple(f"<{end}{prefix}arg_{part}>" for part in ("key", "value") for end in ("", "/")),
        call_begin=f"<{prefix}tool_call>",
        name_end=line_break,
        call_end=f"</{prefix}tool_call>",
        separator=line_break,
        parameter_begin=f"<{prefix}arg_key>",
        key_end=f"</{prefix}arg_key>{line_break}<{prefix}arg_value>",
        parameter_end=f"</{prefix}arg_value>{line_break}",
    )


def _hunyuan_v3(suffix: str = "") -> dict[str, Any]:
    """Return the fields of Hunyuan 3's format. `suffix`: end of the names of all tags."""
    return dict(
        syntax="xml",
        start_markers=(f"<tool_calls{suffix}>", f"<tool_call{suffix}>"),
        end_markers=(f"</tool_call{suffix}>", f"</tool_calls{suffix}>"),
        inner_markers=(
            f"<tool_sep{suffix}>",
            *(f"<{end}arg_{part}{suffix}>" for part in ("key", "value") for end in ("", "/")),
        ),
        section_begin=f"<tool_calls{suffix}>\n",
        section_end=f"\n</tool_calls{suffix}>",
        call_begin=f"<tool_call{suffix}>",
        name_end=f"<tool_sep{suffix}>\n",
        call_end=f"</tool_call{suffix}>",
        separator="\n",
        parameter_begin=f"<arg_key{suffix}>",
        key_end=f"</arg_key{suffix}>\n<arg_value{suffix}>",
        parameter_end=f"</arg_value{suffix}>\n",
    )


# A chat template selects the first format with a matching selector.
TOOL_CALL_FORMATS: tuple[ToolCallFormat, ...] = (
    ToolCallFormat(
        name="harmony",
        syntax="harmony",
        selectors=(("<|channel|>", "<|message|>"),),
        inner_markers=(
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ),
        call_begin="<|start|>assistant<|channel|>commentary to=functions.",
        name_end=" <|constrain|>json<|message|>",
        call_end="<|call|>",
    ),
    ToolCallFormat(name="deepseek_v32", selectors=(("｜DSML｜", "function_calls"),), **_dsml("function_calls")),
    ToolCallFormat(name="deepseek_v4", selectors=(("｜DSML｜",),), **_dsml("tool_calls")),
    ToolCallFormat(
        name="deepseek_v3",
        selectors=(("<｜tool▁call▁begin｜>", "```json"),),
        **_deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```", "\n"),
    ),
    ToolCallFormat(
        name="deepseek_v31",
        selectors=(("<｜tool▁call▁begin｜>",), ("<｜tool▁calls▁begin｜>",)),
        **_deepseek("", "<｜tool▁sep｜>", "", ""),
    ),
    ToolCallFormat(
        name="kimi_k2",
        syntax="named_json",
        selectors=(("<|tool_call_argument_begin|>",), ("<|tool_calls_section_begin|>",)),
        start_markers=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        end_markers=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        inner_markers=("<|tool_call_argument_begin|>",),
        section_begin="<|tool_calls_section_begin|>",
        section_end="<|tool_calls_section_end|>",
        call_begin="<|tool_call_begin|>functions.",
        name_end=":{index}<|tool_call_argument_begin|>",
        call_end="<|tool_call_end|>",
    ),
    ToolCallFormat(
        name="solar_open",
        syntax="named_json",
        selectors=(("<|tool_call:begin|>",),),
        start_markers=("<|tool_calls|>", "<|tool_call:begin|>"),
        end_markers=("<|tool_call:end|>", "<|calls|>"),
        inner_markers=("<|tool_call:name|>", "<|tool_call:args|>"),
        section_begin="<|tool_calls|>",
        section_end="<|calls|>",
        call_begin="<|tool_call:begin|>{index}<|tool_call:name|>",
        name_end="<|tool_call:args|>",
        call_end="<|tool_call:end|>",
    ),
    ToolCallFormat(
        name="minimax_m3",
        syntax="xml",
        selectors=(("]<]minimax[>[",),),
        start_markers=("]<]minimax[>[<tool_call>", "]<]minimax[>[<invoke"),
        end_markers=("]<]minimax[>[</invoke>", "]<]minimax[>[</tool_call>"),
        inner_markers=("]<]minimax[>[",),
        section_begin="]<]minimax[>[<tool_call>\n",
        section_end="\n]<]minimax[>[</tool_call>",
        call_begin=']<]minimax[>[<invoke name="',
        name_end='">',
        call_end="]<]minimax[>[</invoke>",
        separator="\n",
        parameter_begin="]<]minimax[>[<",
        key_end=">",
        parameter_end="]<]minimax[>[</{key}>",
        nested=True,
    ),
    ToolCallFormat(
        name="minimax_m2",
        syntax="xml",
        selectors=(("<minimax:tool_call>",), ("minimax:tool_call",)),
        start_markers=("<minimax:tool_call>", "<invoke name="),
        end_markers=("</invoke>", "</minimax:tool_call>"),
        section_begin="<minimax:tool_call>\n",
        section_end="\n</minimax:tool_call>",
        call_begin='<invoke name="',
        name_end='">\n',
        call_end="</invoke>",
        separator="\n",
        parameter_begin='<parameter name="',
        key_end='">',
        parameter_end="</parameter>\n",
    ),
    ToolCallFormat(
        name="minicpm5",
        syntax="xml",
        selectors=(('<function name="', '<param name="'),),
        start_markers=('<function name="',),
        end_markers=("</function>",),
        call_begin='<function name="',
        name_end='">',
        call_end="</function>",
        separator="\n",
        parameter_begin='<param name="',
        key_end='">',
        parameter_end="</param>",
        character_data=True,
    ),
    ToolCallFormat(
        name="gemma4",
        syntax="gemma",
        selectors=(("<|tool_call>",),),
        start_markers=("<|tool_call>",),
        end_markers=("<tool_call|>",),
        call_begin="<|tool_call>call:",
        name_end="{",
        call_end="}<tool_call|>",
        quote='<|"|>',
    ),
    ToolCallFormat(
        name="gemma3",
        syntax="gemma",
        selectors=(("<start_function_call>",),),
        start_markers=("<start_function_call>",),
        end_markers=("<end_function_call>",),
        call_begin="<start_function_call>call:",
        name_end="{",
        call_end="}<end_function_call>",
        quote="<escape>",
    ),
    ToolCallFormat(
        name="seed_oss",
        selectors=(("<seed:tool_call>",), ("seed:tool_call",)),
        key_end=">",
        parameter_end="</parameter>\n",
        **_function_tags("seed:tool_call"),
    ),
    ToolCallFormat(
        name="qwen3_coder",
        selectors=(("<function=",),),
        key_end=">\n",
        parameter_end="\n</parameter>\n",
        **_function_tags("tool_call"),
    ),
    ToolCallFormat(
        name="hy_v3_opensource",
        selectors=(("tool_sep", "arg_key", ":opensource"),),
        **_hunyuan_v3(":opensource"),
    ),
    ToolCallFormat(name="hy_v3", selectors=(("tool_sep", "arg_key"),), **_hunyuan_v3()),
    ToolCallFormat(name="longcat_xml", selectors=(("<longcat_arg_key>",),), **_key_value_tags("longcat_")),
    ToolCallFormat(name="glm47_moe", selectors=(("</arg_key><arg_value>",),), **_key_value_tags(line_break="")),
    ToolCallFormat(name="glm4_moe", selectors=(("<arg_key>",),), **_key_value_tags()),
    ToolCallFormat(
        name="mistral_v11",
        syntax="named_json",
        selectors=(("[TOOL_CALLS]", "[ARGS]"),),
        start_markers=("[TOOL_CALLS]",),
        inner_markers=("[ARGS]", "[CALL_ID]"),
        id_marker="[CALL_ID]",
        call_begin="[TOOL_CALLS]",
        name_end="[ARGS]",
    ),
    ToolCallFormat(
        name="mistral",
        selectors=(("[TOOL_CALLS]",),),
        start_markers=("[TOOL_CALLS]",),
        inner_markers=("[ARGS]", "[CALL_ID]"),
        id_marker="[CALL_ID]",
        marker_optional=True,
        **_json_list("[TOOL_CALLS] "),
    ),
    ToolCallFormat(
        name="xlam", selectors=(("make calls in a single JSON array",),), marker_optional=True, **_json_list("")
    ),
    ToolCallFormat(
        name="longcat",
        selectors=(("<longcat_tool_call>",),),
        start_markers=("<longcat_tool_call>",),
        end_markers=("</longcat_tool_call>",),
        **_json_call("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    ),
    ToolCallFormat(
        name="nemotron",
        selectors=(("<TOOLCALL>",),),
        start_markers=("<TOOLCALL>",),
        end_markers=("</TOOLCALL>",),
        **_json_list("<TOOLCALL>", "</TOOLCALL>"),
    ),
    ToolCallFormat(
        name="phi4_mini",
        selectors=(("<|/tool_call|>",), ("functools[",), ("<|tool|>", "<|/tool|>")),
        start_markers=("<|tool_call|>", "functools["),
        end_markers=("<|/tool_call|>",),
        **_json_list("<|tool_call|>", "<|/tool_call|>"),
    ),
    ToolCallFormat(
        name="granite",
        selectors=(("<|tool_call|>",),),
        start_markers=("<|tool_call|>", "<tool_call>"),  # Granite 3.1 writes the second marker
        **_json_list("<|tool_call|>"),
    ),
    ToolCallFormat(
        name="cohere",
        syntax="json",
        selectors=(("<|START_ACTION|>",),),
        start_markers=("<|START_ACTION|>",),
        end_markers=("<|END_ACTION|>",),
        section_begin="<|START_ACTION|>[\n",
        section_end="\n]<|END_ACTION|>",
        call_begin='    {"tool_call_id": "{index}", "tool_name": "',
        name_end='", "parameters": ',
        call_end="}",
        separator=",\n",
        name_keys=("tool_name", "name"),
        argument_keys=("parameters", "arguments"),
    ),
    ToolCallFormat(
        name="apertus",
        syntax="json",
        selectors=(("<|tools_prefix|>",),),
        start_markers=("<|tools_prefix|>",),
        end_markers=("<|tools_suffix|>",),
        section_begin="<|tools_prefix|>[",
        section_end="]<|tools_suffix|>",
        call_begin='{"',
        name_end='": ',
        call_end="}",
        separator=", ",
        name_keys=(),
    ),
    ToolCallFormat(
        name="internlm",
        selectors=(("<|action_start|>",),),
        start_markers=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        end_markers=("<|action_end|>",),
        inner_markers=("<|action_start|>", "<|plugin|>", "<|interpreter|>"),
        separator="\n",
        **_json_call("<|action_start|><|plugin|>\n", "<|action_end|>", arguments="parameters"),
    ),
    ToolCallFormat(
        name="lfm2",
        syntax="python",
        selectors=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("List of tools: [",)),
        start_markers=("<|tool_call_start|>",),
        end_markers=("<|tool_call_end|>",),
        section_begin="<|tool_call_start|>[",
        section_end="]<|tool_call_end|>",
        name_end="(",
        call_end=")",
        separator=", ",
    ),
    ToolCallFormat(
        name="olmo3",
        syntax="python",
        selectors=(("<function_calls>",),),
        start_markers=("<function_calls>",),
        end_markers=("</function_calls>",),
        section_begin="<function_calls>\n",
        section_end="\n</function_calls>",
        name_end="(",
        call_end=")",
        separator="\n",
    ),
    ToolCallFormat(
        name="minimax_m1",
        selectors=(("<tool_calls>", "MiniMax"),),
        start_markers=("<tool_calls>",),
        end_markers=("</tool_calls>",),
        section_begin="<tool_calls>\n",
        section_end="\n</tool_calls>",
        separator="\n",
        **_json_call(""),
    ),
    ToolCallFormat(
        name="hunyuan",
        selectors=(("<tool_calls>",),),
        start_markers=("<tool_calls>",),
        end_markers=("</tool_calls>",),
        **_json_list("<tool_calls>", "</tool_calls>"),
    ),
    ToolCallFormat(
        name="hermes",
        selectors=(("<tool_call>",),),
        start_markers=("<tool_call>",),
        end_markers=("</tool_call>",),
        separator="\n",
        **_json_call("<tool_call>\n", "\n</tool_call>"),
    ),
    ToolCallFormat(
        name="llama4_pythonic",
        syntax="python",
        selectors=(("<|python_start|>",), ("[func_name1(",)),
        start_markers=("<|python_start|>",),
        end_markers=("<|python_end|>",),
        marker_optional=True,
        section_begin="[",
        section_end="]",
        name_end="(",
        call_end=")",
        separator=", ",
    ),
    ToolCallFormat(
        name="llama3_json",
        selectors=(("<|python_tag|>",), ("ipython",), ('"parameters": dictionary of argument name',)),
        start_markers=("<|python_tag|>",),
        marker_optional=True,
        separator="; ",
        **_json_call("", arguments="parameters"),
    ),
)
TOOL_CALL_FORMATS_BY_NAME: Mapping[str, ToolCallFormat] = {
    tool_format.name: tool_format for tool_format in TOOL_CALL_FORMATS
}

# A chat template selects the first format with a matching selector.
REASONING_FORMATS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        (("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
    ),
    ReasoningFormat("<seed:think>", "</seed:think>", ("<seed:think>", "</seed:think>", "seed:think")),
    ReasoningFormat("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
    # Solar Open writes its reasoning as a separate message.
    ReasoningFormat(
        "<|think|>",
        "<|end|><|begin|>assistant",
        ("<|begin|>assistant<|think|>",),
        (("<|content|>", "<|end|>"),),
    ),
    ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", ("<|inner_prefix|>", "<|inner_suffix|>")),
    ReasoningFormat("<longcat_think>", "</longcat_think>", ("<longcat_think>", "</longcat_think>")),
    ReasoningFormat("<think:opensource>", "</think:opensource>", ("think:opensource", ":opensource")),
    ReasoningFormat("<mm:think>", "</mm:think>", ("<mm:think>", "</mm:think>")),
    ReasoningFormat("◁think▷", "◁/think▷", ("◁think▷", "◁/think▷")),
    ReasoningFormat(
        "<|begin_of_thought|>",
        "<|end_of_thought|>",
        ("<|begin_of_thought|>",),
        (("<|begin_of_solution|>", "<|end_of_solution|>"),),
    ),
    ReasoningFormat("Here is my thought process:", "Here is my response:", ("Here is my thought process:",)),
    ReasoningFormat(
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        ("[BEGIN FINAL RESPONSE]",),
        (("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),),
    ),
    # MiniMax M1 writes the markers, but its template does not contain them.
    ReasoningFormat("<think>", "</think>", ("<think>", "</think>", "<beginning_of_sentence>ai ")),
)

# Markers around the content after `</think>`. A chat template selects the pairs that it contains.
CONTENT_WRAPPERS = (
    ("<answer>", "</answer>"),  # Hunyuan A13B
    ("<response>", "</response>"),  # Granite 3.3 and ERNIE 4.5
)

# `[name(key=`: how chat templates of pythonic formats describe calls. Name and key may be Jinja expressions.
_PYTHONIC_CALL = re.compile(r"\[\s*(?:\w+|\{\{-?[^{}]*\}\})\(\s*(?:\w+|\{\{-?[^{}]*\}\})\s*=")


def find_tool_format(template: str) -> ToolFormatName | None:
    """Return the name of the tool-call format that a chat template selects; None if no format matches."""
    for tool_format in TOOL_CALL_FORMATS:
        if any(all(text in template for text in selector) for selector in tool_format.selectors):
            return tool_format.name
        if tool_format.name == "llama4_pythonic" and _PYTHONIC_CALL.search(template):
            return tool_format.name
    return None


def tool_format_or_default(template: str) -> ToolFormatName:
    """Return the name of the tool-call format that a chat template selects, or `"hermes"` if no format matches."""
    return find_tool_format(template) or "hermes"


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the reasoning format that a chat template selects; None if the model does not reason."""
    for reasoning in REASONING_FORMATS:
        if not any(text in template for text in reasoning.selectors):
            continue
        if reasoning.begin == "<think>" and "minimax:" not in template:  # MiniMax M2: <response> is a tool's result
            return reasoning._replace(wrappers=tuple(pair for pair in CONTENT_WRAPPERS if pair[0] in template))
        return reasoning
    return None


def iter_functions(tools: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the description of each tool's function.

    A tool is either the description itself or an object `{"type": "function", "function": description}`. Invalid tools
    are skipped.
    """
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            yield function
