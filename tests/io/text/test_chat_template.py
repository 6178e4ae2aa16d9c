"""Chat templates render as in transformers; forbidden operations and endless loops end in an error."""

import concurrent.futures
import importlib.util
import json
import time
from pathlib import Path

import pytest

from eqx_decoders.errors import ConfigError, ConversionError, DataError
from eqx_decoders.io.huggingface.export_directory import copy_tokenizer
from eqx_decoders.io.text import chat_rendering
from eqx_decoders.io.text.chat_template import (
    ChatTemplate,
    Conversation,
    Rendered,
    load_chat_template,
    object_arguments,
)
from eqx_decoders.io.text.published_tokenizer import special_tokens
from eqx_decoders.io.text.tokenizer import JsonTokenizer, load_tokenizer
from tests.errors import assert_names, refused


FIXTURE = Path(__file__).parents[2] / "fixtures" / "chat_llama"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def recorded():
    return json.loads((FIXTURE / "rendered.json").read_text())


@pytest.fixture(scope="module")
def template():
    found = load_chat_template(FIXTURE)
    assert found is not None
    return found


@pytest.mark.slow(fast=("conversation",))
@pytest.mark.parametrize("prompt", [False, True], ids=["conversation", "generation prompt"])
def test_conversations_are_rendered_and_encoded_as_in_transformers(recorded, template, prompt):
    chats = [one for one in recorded["chats"] if one["add_generation_prompt"] is prompt]
    texts = [template.render(one["messages"], add_generation_prompt=prompt) for one in chats]
    assert len(texts) == 4 and texts == [one["text"] for one in chats]
    tokenizer = load_tokenizer(FIXTURE)
    assert isinstance(tokenizer, JsonTokenizer)
    assert [tokenizer.encode(text, special=True).tolist() for text in texts] == [one["ids"] for one in chats]


def test_errors_that_the_template_raises_are_reported(recorded, template):
    with refused(ConversionError, "tokenizer_config.json", "TemplateError", "Roles must alternate"):
        template.render(recorded["refused"])


# Results of transformers 5.23 for a user message " Hi <b> é\\n" and an assistant message.
FEATURES = {
    "blocks are trimmed and stripped": ("a\n  {% if true %}\n  b\n  {% endif %}\n\nc\n", "a\n  b\n\nc"),
    "comments": ("a{# b #}\n  {# c #}\nd", "ad"),
    "tojson": ("{{ messages[0] | tojson }}", '{"role": "user", "content": " Hi <b> é\\n"}'),
    "tojson options": (
        "{{ {'b': 1, 'a': '<é>'} | tojson(indent=1, sort_keys=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}",
        '{\n "a": "<é>",\n "b": 1\n}[1,2]',
    ),
    "loop controls": (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "02",
    ),
    "generation": (
        "x{% for m in messages %}\n  {% generation %}\n{{ m.role }}{{ loop.index }}\n  {% endgeneration %}\n"
        "{% endfor %}y",
        "xuser1\nassistant2\ny",
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "2",
    ),
    "methods": (
        "{{ messages[0]['content'].strip().split(' ')[1] ~ 1 }}{{ messages[1].content.startswith('H') }}",
        "<b>1True",
    ),
    "no escapes": ("{{ messages[0].content }}{{ '<' | e }}", " Hi <b> é\n&lt;"),
    "given": (
        "{{ tools is defined }}{{ tools is none }}{{ documents }}{{ add_generation_prompt }}{{ missing }}",
        "TrueTrueNoneTrue",
    ),
    "variables": ("{{ bos_token }}{{ 'thinks' if enable_thinking }}{{ eos_token is defined }}", "<s>thinksFalse"),
    "None is left out": ("{{ 'tool_calls' in messages[1] }}{{ messages[1].name is defined }}", "FalseFalse"),
    "macros": ("{% macro f(x, y=2) -%} ({{ x }}{{ y }}) {%- endmacro %}{{ f(1) }}{{ f(2, y=3) }}", "(12)(23)"),
    "filters": (
        "{{ messages | map(attribute='role') | join(',') | upper }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ '%s-%d' | format('x', 3) }}",
        "USER,ASSISTANT1x-3",
    ),
    "an empty text": ("{{ '' }}", ""),
    "lazily imported": ("{{ 'a b' | wordwrap(1) }}{{ [1] | pprint }}{{ 'a\\n' | trim }}", "a\nb[1]a"),
}


@pytest.mark.slow(fast=("blocks are trimmed and stripped", "comments"))
@pytest.mark.parametrize("name", FEATURES)
def test_template_language_equals_that_of_transformers(name):
    source, expected = FEATURES[name]
    messages = [
        {"role": "user", "content": " Hi <b> é\n"},
        {"role": "assistant", "content": "Ho", "tool_calls": None, "name": None},
    ]
    found = ChatTemplate(source=source, variables={"bos_token": "<s>"})
    assert found.render(messages, enable_thinking=True) == expected


CALLED = "{{ m.tool_calls[0].function.name }}({{ m.tool_calls[0].function.arguments }})"
# Forms in which published templates accept a message with a tool call and without content, and the rendered text.
SILENT = {
    "None is asked for": (
        "{% if m.content is none %}" + CALLED + "{% else %}{{ m.content + '!' }}{% endif %}",
        "f({})",
    ),
    "the key is asked for": ("{% if 'content' in m %}{{ m.content }}{% endif %}" + CALLED, "f({})"),
    "a text is needed": ("{{ '<' + m.content + '>' }}" + CALLED, "<>f({})"),
    "a length is needed": ("{{ m.content | length }}" + CALLED, "0f({})"),
    "it is written down": ("{{ m.content }}" + CALLED, "f({})"),
    "calls where it is empty": ("{% if m.content == '' %}" + CALLED + "{% endif %}", "f({})"),
    "arguments are objects": (
        "{% for key, value in m.tool_calls[0].function.arguments.items() %}{% endfor %}" + CALLED,
        "f({})",
    ),
    "arguments are texts": ("{{ 'x' + m.tool_calls[0].function.arguments }}", "x{}"),
    "both, or nothing": (
        "{% if m.content is none %}{{ 'x' + m.tool_calls[0].function.arguments + m.tool_calls[0].function.name }}"
        "{% else %}{{ m.content }}{% endif %}",
        "x{}f",
    ),
    "neither": ("{{ m.content + m.nothing + 1 }}", None),
}


@pytest.mark.slow(fast=("None is asked for-no content-object",))
@pytest.mark.parametrize("text", [False, True], ids=["object", "text"])
@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["no content", "None"])
@pytest.mark.parametrize("name", SILENT)
def test_tool_calls_are_passed_in_the_form_of_the_template(name, content, text):
    source, expected = SILENT[name]
    call = {"type": "function", "function": {"name": "f", "arguments": "{}" if text else {}}}
    template = ChatTemplate(source="{% for m in messages %}" + source + "{% endfor %}")
    messages = [{"role": "assistant", **content, "tool_calls": [call]}]
    if expected is None:
        with refused(ConversionError, "UndefinedError"):
            template.render(messages)
    else:
        assert template.render(messages) == expected


@pytest.mark.slow
def test_arguments_that_the_template_accepts_are_unchanged():
    source = (
        "{% for m in messages %}{{ m.content is none }}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    )
    for arguments in ("{}", {}, [1], "no JSON"):
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        found = ChatTemplate(source=source).render([{"role": "assistant", "content": None, "tool_calls": calls}])
        assert found == f"True{json.dumps(arguments)}"


@pytest.mark.parametrize(
    "written",
    ["{{ f.arguments }}", "{{ '' ~ f.arguments }}", "{{ f.arguments | tojson }}"],
    ids=["written", "joined", "tojson"],
)
def test_arguments_are_written_as_json(written):
    source = "{% for m in messages %}{% for c in m.tool_calls %}{% set f = c.function %}{{ f.name }}" + written
    source += "{% endfor %}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": None, "y": [True, "é"]}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate(source=source).render(messages) == 'f{"x": null, "y": [true, "é"]}'


PARTS = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p['text'] }}{% endfor %};{% endfor %}"
EITHER = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}[{{ p['text'] }}]{% endfor %}{% endif %};{% endfor %}"
)
IN_PYTHON = "{% for m in messages %}{{ m.role }}:{{ m.content if m.content is not string }};{% endfor %}{# text #}"


@pytest.mark.parametrize(
    "source, text",
    [(PARTS, "user:hello;"), (EITHER, "user:hello;"), (IN_PYTHON, "user:;")],
    ids=["parts", "either", "python"],
)
def test_texts_become_parts_if_a_template_requires_parts(source, text):
    assert ChatTemplate(source=source).render(HELLO) == text


def test_strftime_now_is_the_local_time():
    text = ChatTemplate(source="{{ strftime_now('%Y-%m-%d %H') }}").render(HELLO)
    now = time.time()
    assert text in [time.strftime("%Y-%m-%d %H", time.localtime(now - ago)) for ago in (0, 60)]


# --- hostile templates ------------------------------------------------------------------------------------------------

TIME = r"\b0\.3 s"  # the limit in the test
HOSTILE = {  # templates, and the Python error or the limit that the message names
    "class": ("{{ messages.__class__ }}", "SecurityError"),
    "subclasses": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "globals of a helper": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "SecurityError"),
    "globals of ours": ("{{ raise_exception.__globals__ }}", "SecurityError"),
    "attr filter": ("{{ messages | attr('__class__') }}", "SecurityError"),
    "map": ("{{ messages | map(attribute='__class__') | list }}", "SecurityError"),
    "format": ("{{ '{0.__class__}'.format(messages) }}", "SecurityError"),
    "format_map": ("{{ '{m.__class__}'.format_map({'m': messages}) }}", "SecurityError"),
    "context": ("{{ self._TemplateReference__context }}", "SecurityError"),
    "change": ("{{ messages.append(1) }}", "SecurityError"),
    "include": ("{% include '/etc/passwd' %}", "TypeError"),
    "import": ("{% import 'os' as os %}{{ os }}", "TypeError"),
    "extends": ("{% extends '/etc/passwd' %}", "TypeError"),
    "huge range": ("{{ range(10**12) }}", "OverflowError"),
    "nested ranges": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", TIME),
    "flood": ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", rf"10,000,000|{TIME}"),
    "endless macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "endless loop": ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "RecursionError"),
    "deep brackets": ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "RecursionError"),
    "many blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "RecursionError|SyntaxError"),
    "no template": ("{% for %}", "TemplateSyntaxError"),
    "a long source": ("a" * 1_000_001, "1,000,001"),
    "control characters": ("{{ raise_exception('\x1b[2J\x07 boo\n\n!') }}", r"TemplateError.*\[2J boo !"),
    "a long complaint": ("{{ raise_exception('boo' * 10000) }}", "TemplateError.*boo"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_a_short_printable_error(name, monkeypatch):
    monkeypatch.setattr(chat_rendering, "MAX_SECONDS", 0.3)
    source, named = HOSTILE[name]
    with pytest.raises(ConversionError, match=named) as caught:
        ChatTemplate(source=source).render(HELLO)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 500


@pytest.mark.slow
def test_the_time_limit_is_processor_time_of_one_conversation(monkeypatch):
    """Other threads keep the processor busy meanwhile, and other conversations take time, too."""
    monkeypatch.setattr(chat_rendering, "MAX_SECONDS", 0.4)
    template = ChatTemplate(source="{% for i in range(n) %}{% for j in range(9999) %}{% endfor %}{% endfor %}x")
    begun = time.thread_time()
    found = template.render_many([Conversation(HELLO, {"n": n}) for n in (1, 99999, 0, *[1] * 40)])
    assert 0.8 < time.thread_time() - begun < 20
    assert isinstance(found[1], ConversionError)
    assert_names(str(found[1]), "0.4 s", "processor time")
    assert all(isinstance(rendered, Rendered) for index, rendered in enumerate(found) if index != 1)


def test_several_threads_render_with_one_template():
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    template = ChatTemplate(source=source)

    def spans(number):
        messages = [{"role": "user", "content": "x" * (number + place)} for place in range(300)]
        rendered = template.rendered(messages)
        return [rendered.text[start:stop] for _, start, stop in rendered.messages]

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for number, found in enumerate(threads.map(spans, range(20))):
            assert found == [f"<{'x' * (number + place)}>" for place in range(300)]


def test_a_failed_conversation_does_not_affect_the_others():
    template = ChatTemplate(
        source="{{ raise_exception('no') if n == 1 else n }}{% generation %}é{{ n }}{% endgeneration %}"
    )
    found = template.render_many([Conversation(HELLO, {"n": n}) for n in range(3)])
    assert isinstance(found[1], ConversionError)
    assert_names(str(found[1]), "TemplateError: no")
    assert [found[n] for n in (0, 2)] == [Rendered(f"{n}é{n}", [(1, 3)], []) for n in (0, 2)]


def test_spans_of_messages_are_returned():
    source = "a{% for m in messages[1:] %}{% for n in messages %}{% endfor %}<{{ m.content }}>{% endfor %}b"
    messages = [{"role": "user", "content": content} for content in ("x", "é", "", "zz")]
    (found,) = ChatTemplate(source=source).render_many([Conversation(messages)])
    assert found == Rendered("a<é><><zz>b", None, [(1, 1, 4), (2, 4, 6), (3, 6, 10)])


def test_reasoning_is_passed_under_all_its_names():
    source = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.reasoning }};{% endfor %}"
    messages = [
        {"role": "assistant", "content": "", name: name} for name in ("reasoning_content", "thinking", "reasoning")
    ]
    want = "reasoning_content|reasoning_content|;thinking|thinking|;reasoning|reasoning|reasoning;||;"
    assert ChatTemplate(source=source).render([*messages, *HELLO]) == want


def test_equal_templates_have_equal_hashes():
    one = ChatTemplate(source="a", variables={"x": "1", "y": "2"}, where="here")
    assert one.content_hash == ChatTemplate(source="a", variables={"y": "2", "x": "1"}, where="there").content_hash
    others = ChatTemplate(source="b", variables=one.variables), ChatTemplate(source="a", variables={"x": "1"})
    assert one.content_hash not in [other.content_hash for other in others]


def test_a_template_file_gets_the_special_tokens_of_the_directory(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ eos_token }}")
    found = load_chat_template(FIXTURE, file=tmp_path / "t.jinja")
    assert found is not None and found.render(HELLO) == "<|end|>"
    with refused(ConfigError, "--chat-template", tmp_path / "none.jinja"):
        load_chat_template(FIXTURE, file=tmp_path / "none.jinja")


# --- messages and templates
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages, named",
    [
        pytest.param([], ["messages=[]"], id="empty"),
        pytest.param("hello", ["messages=hello"], id="text"),
        pytest.param(["hello"], ["messages[0]=hello"], id="list of texts"),
        pytest.param([{"content": "x"}], ["messages[0]", "role='None'"], id="no role"),
        pytest.param([*HELLO, {"role": 3, "content": "x"}], ["messages[1]", "role='3'"], id="role"),
        pytest.param([{"role": "user"}], ["messages[0]", "role", "'content'"], id="no content"),
        pytest.param([{"role": "user", "content": None}], ["messages[0]", "content='None'"], id="content None"),
        pytest.param([{"role": "user", "content": ["x"]}], ["messages[0]", "content=", "['x']"], id="content list"),
        pytest.param([{"role": "user", "content": "x", "more": {1, 2}}], ["messages", "JSON", "set"], id="set"),
    ],
)
def test_malformed_messages_are_refused(messages, named):
    with refused(DataError, *named):
        ChatTemplate(source="hi").render(messages)


def test_a_call_of_a_tool_needs_no_content():
    messages = [{"role": "assistant", "tool_calls": [{"name": "f"}]}]
    assert ChatTemplate(source="{{ messages[0].tool_calls[0].name }}").render(messages) == "f"


def test_describes_tools_if_the_template_requires_it():
    source = "{% for tool in tools %}{{ '// ' + tool.function.description }}{{ tool.function.name }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    tools.append({"type": "function", "function": {"name": "g", "description": "d"}})
    messages = [{"role": "user", "content": "Hi"}]
    assert ChatTemplate(source=source).render(messages, tools=tools) == "// f// dg"
    assert "description" not in ChatTemplate(source="{{ tools | tojson }}").render(messages, tools=tools[:1])


def test_joins_text_and_reasoning_if_the_template_refuses_both():
    source = (
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}"
        "{% endif %}{{ m.thinking }}|{{ m.content }}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "content": "See:", "reasoning_content": "Hm.", "tool_calls": [call]}]
    assert ChatTemplate(source=source).render(messages) == "Hm.\n\nSee:|"
    assert ChatTemplate(source=source.replace("m.tool_calls and", "false and")).render(messages) == "Hm.|See:"


@pytest.mark.parametrize("calls", [None, [], ()], ids=["None", "list", "tuple"])
def test_omits_tool_calls_if_there_are_none(calls):
    source = "{% for m in messages %}{{ m.tool_calls[0].name if 'tool_calls' in m else m.content }}{% endfor %}"
    messages = [{"role": "assistant", "content": "Hi", "tool_calls": calls}]
    assert ChatTemplate(source=source).render(messages) == "Hi"


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused(ImportError, "'jinja2'", "[hf]"):
        ChatTemplate(source="hi").render(HELLO)


# --- template files ---------------------------------------------------------------------------------------------------


def written(folder: Path, **files) -> Path:
    for name, content in files.items():
        name = name.replace("__", ".")
        raw = content if isinstance(content, bytes) else content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    return folder


def source_of(folder: Path, name: str = "default") -> str:
    found = load_chat_template(folder, name)
    assert found is not None
    return found.source


def test_the_newest_format_takes_precedence(tmp_path):
    assert load_chat_template(tmp_path) is None
    assert load_chat_template(written(tmp_path, tokenizer_config__json={"bos_token": "<s>"})) is None
    written(
        tmp_path, tokenizer_config__json={"chat_template": "old", "eos_token": {"content": "</s>"}, "bos_token": None}
    )
    assert source_of(tmp_path) == "old"
    assert source_of(written(tmp_path, chat_template__json={"chat_template": "newer"})) == "newer"
    assert source_of(written(tmp_path, chat_template__jinja="newest é\n")) == "newest é\n"
    found = load_chat_template(tmp_path)
    assert found is not None and found.variables == {"eos_token": "</s>"}
    assert found.where.endswith("chat_template.jinja")


def test_templates_are_selected_by_name(tmp_path):
    rows = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    written(tmp_path, tokenizer_config__json={"chat_template": rows})
    assert source_of(tmp_path) == "a" and source_of(tmp_path, "tool_use") == "b"
    with refused(ConversionError, "tokenizer_config.json", "'tool_us'", "'tool_use'"):
        load_chat_template(tmp_path, "tool_us")
    written(tmp_path, tokenizer_config__json={"chat_template": rows[1:]})
    with refused(ConversionError, "'default'", "tool_use"):
        load_chat_template(tmp_path)


@pytest.mark.parametrize(
    "files, named",
    [
        ({"tokenizer_config__json": {"chat_template": 3}}, ["tokenizer_config.json", "chat_template"]),
        (
            {"tokenizer_config__json": {"chat_template": [{"name": "default"}]}},
            ["tokenizer_config.json", "chat_template"],
        ),
        ({"tokenizer_config__json": {"chat_template": ["x"]}}, ["tokenizer_config.json", "chat_template"]),
        ({"tokenizer_config__json": "[1]"}, ["tokenizer_config.json", "JSON", "list"]),
        ({"tokenizer_config__json": "{"}, ["tokenizer_config.json", "JSON", "line 1"]),
        ({"chat_template__json": "nothing"}, ["chat_template.json", "JSON", "line 1"]),
        ({"chat_template__jinja": b"\xff\xfe"}, ["chat_template.jinja", "UTF-8", "0xff"]),
        ({"chat_template__jinja": "a" * 1_000_001}, ["chat_template.jinja", "1,000,000"]),
        ({"chat_template__jinja": "x", "tokenizer_config__json": {"eos_token": 7}}, ["eos_token=7"]),
    ],
    ids=["number", "no template", "list of texts", "list", "cut JSON", "no JSON", "no UTF-8", "too long", "token"],
)
def test_malformed_files_are_refused(tmp_path, files, named):
    with refused(ConversionError, *named):
        load_chat_template(written(tmp_path, **files))


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_links_that_lead_out_are_refused(tmp_path, name):
    (tmp_path / "secret").write_text('{"chat_template": "secret"}')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).symlink_to(tmp_path / "secret")
    with refused(ConversionError, tmp_path / "model" / name):
        load_chat_template(tmp_path / "model")


def test_special_tokens_map_takes_precedence_as_in_transformers():
    settings, older = {"bos_token": "<a>", "pad_token": None, "other": 3}, {"bos_token": "<b>", "eos_token": "<c>"}
    assert special_tokens(settings, older) == {"bos_token": "<b>", "eos_token": "<c>", "pad_token": None}
    settings["added_tokens_decoder"] = {}
    assert special_tokens(settings, older) == {"bos_token": "<a>", "pad_token": None}


def test_messages_and_variables_are_copied_as_json():
    template = ChatTemplate(source="{{ messages[0].content }}{{ tools }}{{ tools[0].a['2.5'] }}")
    text = template.render(HELLO, tools=({"a": {2.5: (1, "x"), None: True}},))
    assert text == "hello[{'a': {'2.5': [1, 'x'], 'null': True}}][1, 'x']"
    message = {"role": "user", "content": "a"}  # the same object twice
    spans = ChatTemplate(source="{% for m in messages %}{{ m.content }}{% endfor %}").rendered([message, message])
    assert spans.messages == [(0, 0, 1), (1, 1, 2)]


def cached(folder: Path) -> Path:
    """Return a snapshot as in huggingface_hub's cache, whose files are links to blobs of the repository."""
    repository = folder / "models--a--b"
    snapshot = repository / "snapshots" / "abc"
    (snapshot / "additional_chat_templates").mkdir(parents=True)
    (repository / "blobs").mkdir()
    for blob, link, up in (
        ("x", "chat_template.jinja", "../../blobs"),
        ("y", "additional_chat_templates/tool_use.jinja", "../../../blobs"),
        ("z", "additional_chat_templates/my tools.jinja", "../../../blobs"),
    ):
        (repository / "blobs" / blob).write_text(blob)
        (snapshot / link).symlink_to(f"{up}/{blob}")
    return snapshot


def test_named_templates_of_a_cache_are_loaded_and_copied(tmp_path):
    snapshot, copy = cached(tmp_path), tmp_path / "copy"
    copy.mkdir()
    copy_tokenizer(snapshot, copy)
    for folder in (snapshot, copy):
        assert [source_of(folder, name) for name in ("default", "tool_use", "my tools")] == ["x", "y", "z"]


@pytest.mark.parametrize("link", ["folder", "file"])
def test_named_templates_outside_of_the_directory_are_refused(link, tmp_path):
    outside, inside, copy = (tmp_path / name for name in ("outside", "inside", "copy"))
    for folder in (outside, inside, copy):
        folder.mkdir()
    (outside / "secret.jinja").write_text("secret")
    if link == "folder":
        (inside / "additional_chat_templates").symlink_to(outside)
    else:
        (inside / "additional_chat_templates").mkdir()
        (inside / "additional_chat_templates" / "secret.jinja").symlink_to(outside / "secret.jinja")
    for read in (load_chat_template, lambda directory: copy_tokenizer(directory, copy)):
        with refused(ConversionError, inside / "additional_chat_templates" / "secret.jinja"):
            read(inside)


@pytest.mark.parametrize(
    "arguments", [None, "", " \n", "null", "{}", {}], ids=["None", "empty", "space", "null", "text", "object"]
)
def test_missing_arguments_are_an_empty_object(arguments):
    assert object_arguments(arguments) == {}


def test_arguments_are_parsed():
    assert object_arguments('{"a": [1]}') == object_arguments({"a": [1]}) == {"a": [1]}
    assert object_arguments("[1]") == [1]
    for text in ("{", "[" * 100_000):
        with pytest.raises(ValueError):
            object_arguments(text)
