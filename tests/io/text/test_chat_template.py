"""Chat templates give what transformers gives, and a hostile one ends in a sentence, quickly and without harm."""

import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eqx_decoders.errors import ConfigError, ConversionError, DataError
from eqx_decoders.io.huggingface.export_directory import copy_tokenizer
from eqx_decoders.io.text import chat_template, chat_template_worker
from eqx_decoders.io.text.chat_template import (
    ChatTemplate,
    Conversation,
    Rendered,
    RenderingProcess,
    load_chat_template,
    object_arguments,
)
from eqx_decoders.io.text.published_tokenizer import special_tokens
from eqx_decoders.io.text.tokenizer import JsonTokenizer, load_tokenizer


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


@pytest.mark.slow(fast=("False",))
@pytest.mark.parametrize("prompt", [False, True])
def test_conversations_are_rendered_and_encoded_as_transformers_does(recorded, template, prompt):
    chats = [one for one in recorded["chats"] if one["add_generation_prompt"] is prompt]
    texts = [template.render(one["messages"], add_generation_prompt=prompt) for one in chats]
    assert len(texts) == 4 and texts == [one["text"] for one in chats]
    tokenizer = load_tokenizer(FIXTURE)
    assert isinstance(tokenizer, JsonTokenizer)
    assert [tokenizer.encode(text, special=True).tolist() for text in texts] == [one["ids"] for one in chats]


def test_what_the_template_refuses_is_told(recorded, template):
    with pytest.raises(ConversionError, match=r"tokenizer_config.json.*TemplateError: Roles"):
        template.render(recorded["refused"])


# What transformers 5.23 makes of each, of a user's message " Hi <b> é\\n" and an assistant's.
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
def test_the_language_is_that_of_transformers(name):
    source, expected = FEATURES[name]
    messages = [
        {"role": "user", "content": " Hi <b> é\n"},
        {"role": "assistant", "content": "Ho", "tool_calls": None, "name": None},
    ]
    found = ChatTemplate(source=source, variables={"bos_token": "<s>"})
    assert found.render(messages, enable_thinking=True) == expected


CALLED = "{{ m.tool_calls[0].function.name }}({{ m.tool_calls[0].function.arguments }})"
# Forms in which published templates take a message that calls a tool and says nothing, and what comes of it.
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


@pytest.mark.slow(fast=("None is asked for-content0-False",))
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("content", [{}, {"content": None}])
@pytest.mark.parametrize("name", SILENT)
def test_calls_are_given_as_the_template_takes_them(name, content, text):
    source, expected = SILENT[name]
    call = {"type": "function", "function": {"name": "f", "arguments": "{}" if text else {}}}
    template = ChatTemplate(source="{% for m in messages %}" + source + "{% endfor %}")
    messages = [{"role": "assistant", **content, "tool_calls": [call]}]
    if expected is None:
        with pytest.raises(ConversionError, match=r"cannot be rendered: (TypeError|UndefinedError)"):
            template.render(messages)
    else:
        assert template.render(messages) == expected


@pytest.mark.slow
def test_what_the_template_takes_is_given_as_it_is():
    """As with transformers: no other form where the first one works, whatever the arguments are."""
    source = (
        "{% for m in messages %}{{ m.content is none }}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    )
    for arguments in ("{}", {}, [1], "no JSON"):
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        found = ChatTemplate(source=source).render([{"role": "assistant", "content": None, "tool_calls": calls}])
        assert found == f"True{json.dumps(arguments)}"


@pytest.mark.parametrize("written", ["{{ f.arguments }}", "{{ '' ~ f.arguments }}", "{{ f.arguments | tojson }}"])
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
def test_texts_become_parts_if_a_template_only_writes_parts(source, text):
    assert ChatTemplate(source=source).render(HELLO) == text


def test_the_time_is_told():
    text = ChatTemplate(source="{{ strftime_now('%Y-%m-%d %H') }}").render(HELLO)
    now = time.time()
    assert text in [time.strftime("%Y-%m-%d %H", time.localtime(now - ago)) for ago in (0, 60)]


# --- hostile templates ------------------------------------------------------------------------------------------------

DOUBLE = "".join("{% set x = x ~ x %}" for _ in range(60))
NEST = "{% set x = [1] %}" + "".join("{% set x = [x, x] %}" for _ in range(60))
HOSTILE = {
    "class": ("{{ messages.__class__ }}", "not allowed"),
    "subclasses": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "not allowed"),
    "globals of a helper": ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "not allowed"),
    "globals of ours": ("{{ raise_exception.__globals__ }}", "not allowed"),
    "attr filter": ("{{ messages | attr('__class__') }}", "not allowed"),
    "map": ("{{ messages | map(attribute='__class__') | list }}", "not allowed"),
    "format": ("{{ '{0.__class__}'.format(messages) }}", "not allowed"),
    "format_map": ("{{ '{m.__class__}'.format_map({'m': messages}) }}", "not allowed"),
    "context": ("{{ self._TemplateReference__context }}", "not allowed"),
    "change": ("{{ messages.append(1) }}", "not allowed"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import 'os' as os %}{{ os }}", "no loader"),
    "extends": ("{% extends '/etc/passwd' %}", "no loader"),
    "huge range": ("{{ range(10**12) }}", "Range too big"),
    "nested ranges": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "processor"),
    "huge power": ("{{ (10 ** (10 ** 9)) > 1 }}", "processor time|MemoryError"),
    "huge string": ("{{ ('a' * 10 ** 10) | length }}", "MemoryError"),
    "huge padding": ("{{ 'a'.center(10 ** 11) | length }}", "MemoryError"),
    "huge number": ("{{ '%99999999999d' % 1 }}", "width too big|MemoryError|too many"),
    "doubled strings": ("{% set x = 'a' %}" + DOUBLE + "{{ x | length }}", "processor time|MemoryError"),
    "doubled lists": (NEST + "{{ x }}", "MemoryError|processor time"),
    "equal lists": (NEST + NEST.replace("x", "y") + "{{ x == y }}", "processor time"),
    "flood": (
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "10,000,000 characters|processor time",
    ),
    "endless macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "endless loop": ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "RecursionError"),
    "lorem ipsum": ("{{ lipsum(n=10 ** 9) }}", "processor time|MemoryError"),
    "deep brackets": ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "RecursionError|process ended"),
    "many blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "RecursionError|nested|process ended"),
    "no template": ("{% for %}", "TemplateSyntaxError"),
    "a long source": ("a" * 1_000_001, "1,000,001 bytes"),
    "control characters": ("{{ raise_exception('\x1b[2J\x07 boo\n\n!') }}", r"TemplateError: \[2J boo !"),
    "a long complaint": ("{{ raise_exception('boo' * 10000) }}", "TemplateError: boo"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_a_sentence(name, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    source, says = HOSTILE[name]
    with pytest.raises(ConversionError, match=says) as caught:
        ChatTemplate(source=source).render(HELLO)
    sentence = str(caught.value)
    assert sentence.isprintable() and len(sentence) < 500


@pytest.mark.slow
def test_a_template_has_a_second_of_processor_time():
    """Of processor time: other programs may keep the machine busy. The limit's clock and this one differ a little."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(ConversionError, match="takes more than 1 s of processor time"):
        ChatTemplate(source=HOSTILE["nested ranges"][0]).render(HELLO)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert 0.8 < (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 5


@pytest.mark.slow
def test_the_time_is_that_of_each_and_of_all(monkeypatch):
    """Long ones among many get their second; but not all of them, and one that never ends doesn't get that of all."""
    monkeypatch.setattr(chat_template, "SECONDS", 0.4)
    loop = "{% for i in range(n) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"

    def render(*loops):
        return ChatTemplate(source=loop).render_many([Conversation(HELLO, {"n": n}) for n in loops])

    begun = time.perf_counter()
    with pytest.raises(ConversionError, match=r"more than 0\.4 s of processor time"):
        render(1, 99999, *[0] * 200)
    assert time.perf_counter() - begun < 60
    monkeypatch.setattr(chat_template, "MORE_SECONDS", 0.0)
    monkeypatch.setattr(chat_template, "SECONDS", 60.0)
    monkeypatch.setattr(chat_template.math, "ceil", lambda seconds: 0)
    with pytest.raises(ConversionError, match=r"more than 0 s on average of processor time"):
        render(*[100] * 200)


def test_one_that_fails_leaves_the_others_alone():
    template = ChatTemplate(
        source="{{ raise_exception('no') if n == 1 else n }}{% generation %}é{{ n }}{% endgeneration %}"
    )
    found = template.render_many([Conversation(HELLO, {"n": n}) for n in range(3)])
    assert isinstance(found[1], ConversionError) and "no" in str(found[1])
    assert [found[n] for n in (0, 2)] == [Rendered(f"{n}é{n}", [[1, 3]], []) for n in (0, 2)]


def test_where_messages_stand_is_told():
    source = "a{% for m in messages[1:] %}{% for n in messages %}{% endfor %}<{{ m.content }}>{% endfor %}b"
    messages = [{"role": "user", "content": content} for content in ("x", "é", "", "zz")]
    (found,) = ChatTemplate(source=source).render_many([Conversation(messages)])
    assert found == Rendered("a<é><><zz>b", None, [[1, 1, 4], [2, 4, 6], [3, 6, 10]])


def test_thoughts_go_by_all_their_names():
    """As transformers gives them: templates ask for one or the other."""
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


def test_a_file_is_taken_with_the_tokens_of_the_directory(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ eos_token }}")
    found = load_chat_template(FIXTURE, file=tmp_path / "t.jinja")
    assert found is not None and found.render(HELLO) == "<|end|>"
    with pytest.raises(ConfigError, match=r"--chat-template.*none\.jinja'"):
        load_chat_template(FIXTURE, file=tmp_path / "none.jinja")


def test_a_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(chat_template, "WALL_SECONDS", -0.9)  # and a second for the conversation
    with pytest.raises(ConversionError, match=r"took more than 0\.1 s"):
        ChatTemplate(source=HOSTILE["nested ranges"][0]).render(HELLO)


def test_a_hole_in_the_sandbox_leads_nowhere(tmp_path):
    """What a template could do that had got hold of Python: no files, no sockets, no programs."""
    code = f"""
import importlib.util, os, socket, subprocess, sys
spec = importlib.util.spec_from_file_location("worker", {chat_template_worker.__file__!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
worker.confine(60)
def shell():
    if os.system("true"):
        raise OSError("it did not run")


for attempt in (
    lambda: open("/etc/passwd"),
    lambda: open("evil", "w"),
    lambda: socket.socket(),
    lambda: subprocess.run(["id"]),
    shell,
    lambda: bytearray(4 << 30),
):
    try:
        attempt()
        print("done")
    except (OSError, MemoryError):
        print("failed")
"""
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["failed"] * 6


def test_secrets_stay_here(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    seen = {}
    start = subprocess.Popen
    monkeypatch.setattr(
        chat_template.subprocess, "Popen", lambda *args, **options: start(*args, **seen.setdefault("options", options))
    )
    assert ChatTemplate(source="hi").render(HELLO) == "hi"
    assert "secret" not in str(seen["options"]) and "PATH" in seen["options"]["env"]
    assert "HF_TOKEN" in os.environ


# --- what is asked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages, says",
    [
        ([], "at least one message"),
        ("hello", "messages=hello must be a list"),
        (["hello"], r"messages\[0\]=hello must be an object"),
        ([{"content": "x"}], r"messages\[0\]: role='None' must be a word"),
        ([*HELLO, {"role": 3, "content": "x"}], r"messages\[1\]: role='3'"),
        ([{"role": "user"}], "has no content; its keys: role. Write its text under 'content'"),
        ([{"role": "user", "content": None}], "content='None' must be a text"),
        ([{"role": "user", "content": ["x"]}], "content=.* must be a text"),
        ([{"role": "user", "content": "x", "more": {1, 2}}], "must be JSON values"),
    ],
)
def test_messages_of_another_form_are_refused(messages, says):
    with pytest.raises(DataError, match=says):
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


@pytest.mark.parametrize("calls", [None, [], ()])
def test_omits_tool_calls_if_there_are_none(calls):
    source = "{% for m in messages %}{{ m.tool_calls[0].name if 'tool_calls' in m else m.content }}{% endfor %}"
    messages = [{"role": "assistant", "content": "Hi", "tool_calls": calls}]
    assert ChatTemplate(source=source).render(messages) == "Hi"


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"jinja2.*eqx_decoders\[hf\]"):
        ChatTemplate(source="hi").render(HELLO)


def test_windows_can_import_it_and_refuses_to_render(monkeypatch):
    for name in ("resource", "fcntl"):
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("chat_on_windows", chat_template.__file__)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, found)
    with monkeypatch.context() as patch:
        for name in ("SIGPROF", "setitimer", "ITIMER_PROF"):
            patch.delattr(signal, name)
        patch.setattr(sys, "platform", "win32")
        spec.loader.exec_module(found)
        with pytest.raises(ConversionError, match="Windows has no limits"):
            found.ChatTemplate(source="hi").render(HELLO)


# --- where it is ------------------------------------------------------------------------------------------------------


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


def test_the_newest_kind_of_file_wins(tmp_path):
    assert load_chat_template(tmp_path) is None
    assert load_chat_template(written(tmp_path, tokenizer_config__json={"bos_token": "<s>"})) is None
    written(
        tmp_path, tokenizer_config__json={"chat_template": "old", "eos_token": {"content": "</s>"}, "bos_token": None}
    )
    assert source_of(tmp_path) == "old"
    assert source_of(written(tmp_path, chat_template__json={"chat_template": "newer"})) == "newer"
    assert source_of(written(tmp_path, chat_template__jinja="newest é\n")) == "newest é\n"
    found = load_chat_template(tmp_path)
    assert (
        found is not None and found.variables == {"eos_token": "</s>"} and found.where.endswith("chat_template.jinja")
    )


def test_one_of_several_is_chosen_by_name(tmp_path):
    rows = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    written(tmp_path, tokenizer_config__json={"chat_template": rows})
    assert source_of(tmp_path) == "a" and source_of(tmp_path, "tool_use") == "b"
    with pytest.raises(ConversionError, match=r"'tool_us'.*'tool_use'"):
        load_chat_template(tmp_path, "tool_us")
    written(tmp_path, tokenizer_config__json={"chat_template": rows[1:]})
    with pytest.raises(ConversionError, match=r"'default'.*tool_use"):
        load_chat_template(tmp_path)


@pytest.mark.parametrize(
    "files, says",
    [
        ({"tokenizer_config__json": {"chat_template": 3}}, "must be a text, or a list"),
        ({"tokenizer_config__json": {"chat_template": [{"name": "default"}]}}, "with a name and a template each"),
        ({"tokenizer_config__json": {"chat_template": ["x"]}}, "with a name and a template each"),
        ({"tokenizer_config__json": "[1]"}, "must hold a JSON object"),
        ({"tokenizer_config__json": "{"}, "no JSON"),
        ({"chat_template__json": "nothing"}, "no JSON"),
        ({"chat_template__jinja": b"\xff\xfe"}, "no UTF-8"),
        ({"chat_template__jinja": "a" * 1_000_001}, "more than 1,000,000 bytes"),
        ({"chat_template__jinja": "x", "tokenizer_config__json": {"eos_token": 7}}, "eos_token=7 must be a text"),
    ],
)
def test_files_that_are_not_as_they_should_be(tmp_path, files, says):
    with pytest.raises(ConversionError, match=says):
        load_chat_template(written(tmp_path, **files))


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_links_that_lead_out_are_refused(tmp_path, name):
    (tmp_path / "secret").write_text('{"chat_template": "secret"}')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ConversionError, match="leads out of its directory"):
        load_chat_template(tmp_path / "model")


def test_the_older_list_of_special_tokens_counts_as_in_transformers():
    settings, older = {"bos_token": "<a>", "pad_token": None, "other": 3}, {"bos_token": "<b>", "eos_token": "<c>"}
    assert special_tokens(settings, older) == {"bos_token": "<b>", "eos_token": "<c>", "pad_token": None}
    settings["added_tokens_decoder"] = {}
    assert special_tokens(settings, older) == {"bos_token": "<a>", "pad_token": None}


@pytest.mark.slow
def test_a_process_that_was_started_ahead_renders_the_same():
    """Once; one that has ended is not asked."""
    template, work = ChatTemplate(source="{{ messages[0].content }}"), [Conversation(HELLO)]
    process = RenderingProcess()
    assert process.alive
    assert template.render_many(work, process) == template.render_many(work)
    assert not process.alive
    assert template.render_many(work, process) == template.render_many(work)


@pytest.mark.slow
def test_what_ends_a_process_takes_no_others_with_it(monkeypatch):
    """Those before it are there; it is the first of the next process, and the only one that has to fail."""
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    loop = "{% for i in range(n) %}{% for j in range(9999) %}{% endfor %}{% endfor %}{{ n }}"
    template, work = ChatTemplate(source=loop), [Conversation(HELLO, {"n": n}) for n in (0, 1, 99999, 0)]
    found = template.render_some(work)
    assert [one.text for one in found] == ["0", "1"]
    (error,) = template.render_some(work[2:])
    assert isinstance(error, ConversionError) and "more than 0.3 s" in str(error)
    assert [one.text for one in template.render_some(work[3:])] == ["0"]


@pytest.mark.slow(fast=("a\\xe9\\U0001f600",))
@pytest.mark.parametrize("letters", ["aé😀", "\ud83d", '"\\\n'])
def test_long_conversations_are_given_and_taken_in_pieces(letters, monkeypatch):
    """No call reads or writes the JSON of all of one, which would stop all threads."""
    most, dumps, loads = [0], json.dumps, json.loads

    def dumped(value, **options):
        most[0] = max(most[0], len(text := dumps(value, **options)))
        return text

    def loaded(text):
        most[0] = max(most[0], len(text))
        return loads(text)

    template = ChatTemplate(source="{{ messages[0].content }}{{ tools[0].a[2.5] }}")
    messages, tools = [{"role": "user", "content": letters * 100_000}], [{"a": {2.5: [1, "x"], None: True}}]
    text = "".join(chat_template._json([messages, tools, {"a": [], "b": {}, "c": (1, None)}]))
    assert text == dumps([messages, tools, {"a": [], "b": {}, "c": (1, None)}])
    monkeypatch.setattr(chat_template.json, "dumps", dumped), monkeypatch.setattr(chat_template.json, "loads", loaded)
    assert template.rendered(messages, tools=tools).text == letters * 100_000
    assert 0 < most[0] <= 12 * chat_template.PIECE + 3


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
    with pytest.raises(ConversionError, match=r"secret\.jinja leads out of its directory"):
        load_chat_template(inside)
    with pytest.raises(ConversionError, match=r"secret\.jinja leads out of its directory"):
        copy_tokenizer(inside, copy)


@pytest.mark.parametrize("arguments", [None, "", " \n", "null", "{}", {}])
def test_missing_arguments_are_an_empty_object(arguments):
    assert object_arguments(arguments) == {}


def test_arguments_are_parsed():
    assert object_arguments('{"a": [1]}') == object_arguments({"a": [1]}) == {"a": [1]}
    assert object_arguments("[1]") == [1]
    for text in ("{", "[" * 100_000):
        with pytest.raises(ValueError):
            object_arguments(text)
