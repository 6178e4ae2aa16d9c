"""Structured output: every text that is sampled from the allowed tokens matches the format and ends."""

import asyncio
import json
import random
import re
import threading

import pytest

from eqx_decoders.errors import ConfigError
from eqx_decoders.io.text.tokenizer import ByteTokenizer, load_tokenizer
from eqx_decoders.serving.frontend import structured_output
from eqx_decoders.serving.frontend.api_errors import ApiError
from eqx_decoders.serving.frontend.structured_output import ANY_OBJECT, MAX_CACHED, Grammar, GrammarCompiler
from tests.errors import assert_names, refused
from tests.serving.fake_engine import allowed_tokens
from tests.serving.servers import CHAT


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "kind": {"enum": ["cat", "dög"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["fixture", "bytes"])
def compiler(request) -> GrammarCompiler:
    if request.param == "bytes":
        return GrammarCompiler(ByteTokenizer(), 320, [257, 258])
    return GrammarCompiler(load_tokenizer(CHAT), 320, [257, 258])


def constraint_of(compiler: GrammarCompiler, form: Grammar):
    (found,) = asyncio.run(compiler.prepare(form, 1))
    return found


def sample_text(compiler: GrammarCompiler, form: Grammar, seed: int, most: int = 400) -> tuple[str, bool]:
    """Sample allowed tokens. Returns the text, and whether it ended with a stop token."""
    constraint, ids, pick = constraint_of(compiler, form), [], random.Random(seed)
    for _ in range(most):
        token = pick.choice(allowed_tokens(constraint))
        if token in (257, 258):
            return compiler._tokenizer.decode(ids), True
        constraint.accept(token)
        ids.append(token)
    return compiler._tokenizer.decode(ids), False


@pytest.mark.parametrize("seed", range(5))
def test_sampled_texts_match_the_format(compiler, seed):
    text, ended = sample_text(compiler, Grammar("json", json.dumps(SCHEMA)), seed)
    found = json.loads(text)
    assert ended and list(found) == ["name", "kind", "ages"] and found["kind"] in ("cat", "dög")
    assert len(found["name"]) <= 3 and len(found["ages"]) <= 2 and all(0 <= age <= 9 for age in found["ages"])
    found = sample_text(compiler, Grammar("regex", "[a-c]{3}é[0-9]"), seed)[0]
    assert re.fullmatch(r"[a-c]{3}é\d", found), found
    choices = ('say "hi"\n', "né", "a\\b")
    assert sample_text(compiler, Grammar("choice", choices), seed)[0] in choices
    text, ended = sample_text(compiler, Grammar("grammar", 'start: "x" ("," "x")~2'), seed)
    assert (text, ended) == ("x,x,x", True)


def test_whitespace_in_json_is_limited():
    for whitespace in (b" ", b"\n" + 20 * b" ", b"\r\n\t\t"):
        constraint = constraint_of(GrammarCompiler(ByteTokenizer(), 320, [257]), ANY_OBJECT)
        for token in b"{" + whitespace:
            assert token in allowed_tokens(constraint)
            constraint.accept(token)
        assert b'"'[0] in allowed_tokens(constraint)
        for token in (b"\t\t" + 20 * b" ") if whitespace[0] != 32 else b"":
            if token in allowed_tokens(constraint):
                constraint.accept(token)
        assert not set(b" \t\r\n") & set(allowed_tokens(constraint))


def test_complete_text_allows_only_the_stop_ids(compiler):
    constraint = constraint_of(compiler, Grammar("choice", ("a",)))
    constraint.accept(allowed_tokens(constraint)[0])
    assert allowed_tokens(constraint) == [257, 258] and constraint.error == ""


def test_disallowed_token_leaves_only_the_stop_ids(compiler):
    constraint = constraint_of(compiler, Grammar("choice", ("a",)))
    constraint.accept(5)
    assert allowed_tokens(constraint) == [257, 258] and "satisfy" in constraint.error


def test_answers_with_one_grammar_have_separate_states(compiler):
    one, other = (constraint_of(compiler, Grammar("regex", "ab")) for _ in range(2))
    before = allowed_tokens(other)
    one.accept(before[0])
    assert allowed_tokens(other) == before != allowed_tokens(one)
    constraint_of(compiler, ANY_OBJECT)
    for number in range(MAX_CACHED + 3):
        constraint_of(compiler, Grammar("regex", f"a{number}"))
    assert len(compiler._cache) == MAX_CACHED and ANY_OBJECT in compiler._cache


def test_cache_of_grammars_that_compile_slowly_is_limited(monkeypatch):
    """Such grammars use much memory."""
    compiler, clock = GrammarCompiler(ByteTokenizer(), 320, [257]), [0.0]
    monkeypatch.setattr(structured_output.time, "thread_time", lambda: clock[0])
    compiled = compiler._compile

    def costly(form):
        clock[0] += 0.6 if form != ANY_OBJECT else 0.1
        return compiled(form)

    monkeypatch.setattr(compiler, "_compile", costly)
    for form in (ANY_OBJECT, *(Grammar("regex", f"a{number}") for number in range(6))):
        constraint_of(compiler, form)
    assert {form.content for form in compiler._cache} == {ANY_OBJECT.content, "a3", "a4", "a5"}


DEEP = "[" * 100_000
BAD = {
    "not an object": (Grammar("json", "5"), ["JSON Schema", "5"]),
    "not JSON": (Grammar("json", "{bad"), ["JSON Schema", "line 1 column 2"]),
    "no type": (Grammar("json", '{"type": "nope"}'), ["JSON Schema", '`type="nope"`', "integer"]),
    "look-ahead": (Grammar("json", '{"type": "string", "pattern": "(?=a)b"}'), ["JSON Schema", '`pattern="(?=a)b"`']),
    "elsewhere": (Grammar("json", '{"$ref": "http://127.0.0.1:1/x"}'), ["JSON Schema", "http://127.0.0.1:1/x"]),
    "no value": (Grammar("json", '{"enum": []}'), ["JSON Schema"]),
    "itself": (Grammar("json", '{"$ref": "#"}'), ["JSON Schema"]),
    "deep": (Grammar("json", DEEP), ["JSON Schema", "recursion"]),
    "open class": (Grammar("regex", "(["), ["regular expression"]),
    "deep regex": (Grammar("regex", "(" * 100_000), ["regular expression"]),
    "no rule": (Grammar("grammar", "start: x"), ["grammar", '"x"']),
    "no start": (Grammar("grammar", ""), ["grammar"]),
    "endless": (Grammar("grammar", 'start: start "a"'), ["grammar"]),
    "large": (Grammar("regex", "a" * 600_000), ["regular expression", "600,000", "100,000"]),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_grammars_are_refused(compiler, name):
    form, names = BAD[name]
    with refused(ConfigError, *names) as error:
        constraint_of(compiler, form)
    assert len(str(error.value)) < 500


def test_grammars_with_too_many_symbols_are_refused(compiler, monkeypatch):
    form = Grammar("grammar", 'start: x "," x\nx: "a" | "b" y\ny: "c" x | "d"')
    assert allowed_tokens(constraint_of(compiler, form))
    monkeypatch.setattr(structured_output, "MAX_SYMBOLS", 5)
    with refused(ConfigError, "grammar", "symbols", "5"):
        constraint_of(compiler, form._replace(content=f"{form.content}\n"))


def test_grammars_need_a_stop_token():
    with refused(ConfigError, "JSON Schema", "token"):
        constraint_of(GrammarCompiler(ByteTokenizer(), 300, []), ANY_OBJECT)


def test_choices_with_characters_that_need_escapes(compiler):
    text = "".join(map(chr, range(1, 128))) + "\x80\u2028"
    constraint = constraint_of(compiler, Grammar("choice", (text,)))
    for token in compiler._tokenizer.encode(text).tolist():
        assert token in allowed_tokens(constraint)
        constraint.accept(token)
    assert allowed_tokens(constraint) == [257, 258]


def test_error_of_one_of_advises_any_of(compiler):
    kinds = [{"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab"]
    with refused(ConfigError, "`oneOf`", "`anyOf`"):
        constraint_of(compiler, Grammar("json", json.dumps({"oneOf": kinds})))


# --- on an event loop -------------------------------------------------------------------------------------------------


async def settle() -> None:
    """Run all tasks until every task waits."""
    for _ in range(20):
        await asyncio.sleep(0)


class GatedCompiler(GrammarCompiler):
    """A compiler that waits for an event before each compilation, and records the compilations."""

    def __init__(self, *words):
        super().__init__(ByteTokenizer(), 320, [257])
        self.gate, self.compiled = threading.Event(), []
        self.warm_up()
        self._threads.submit(lambda: None).result()
        while ANY_OBJECT not in self._cache:
            pass

    def _compile(self, form):
        if form != ANY_OBJECT:
            self.compiled.append(form.content)
            assert self.gate.wait(30)
        return super()._compile(form)


@pytest.fixture
def gated():
    found = GatedCompiler()
    yield found
    found.gate.set()
    found.close()


def test_compiles_each_grammar_once_and_caches_errors(gated):
    async def run():
        good, bad = Grammar("regex", "ab"), Grammar("regex", "([")
        work = [asyncio.ensure_future(gated.prepare(form, 2)) for form in (good, good, bad, bad)]
        await settle()
        gated.gate.set()
        found = await asyncio.gather(*work, return_exceptions=True)
        assert [len(one) for one in found[:2]] == [2, 2]
        for error in (found[2], found[3]):
            assert isinstance(error, ConfigError)
            assert_names(str(error), "regular expression")
        with refused(ConfigError, "regular expression"):
            await gated.prepare(bad, 1)
        assert sorted(gated.compiled) == ["([", "ab"] and gated._compiling == {}

    asyncio.run(run())


def test_slow_compilations_do_not_delay_cached_grammars(gated):
    async def run():
        costly = [asyncio.ensure_future(gated.prepare(Grammar("regex", f"a{n}"), 1)) for n in range(6)]
        await settle()
        (found,) = await gated.prepare(ANY_OBJECT, 1)
        assert found.error == "" and not any(task.done() for task in costly)
        gated.gate.set()
        await asyncio.gather(*costly)
        assert gated._compiling == {}

    asyncio.run(run())


def test_does_not_compile_a_cancelled_grammar(gated):
    async def run():
        begun = [asyncio.ensure_future(gated.prepare(Grammar("regex", f"a{n}"), 1)) for n in range(2)]
        await settle()
        gone = [asyncio.ensure_future(gated.prepare(Grammar("regex", "b"), 1)) for _ in range(2)]
        await settle()
        gone[0].cancel()
        await settle()
        assert Grammar("regex", "b") in gated._compiling  # the other one still waits
        gone[1].cancel()
        await settle()
        again = asyncio.ensure_future(gated.prepare(Grammar("regex", "c"), 1))
        gated.gate.set()
        await asyncio.gather(*begun, again)
        assert sorted(gated.compiled) == ["a0", "a1", "c"] and gated._compiling == {}

    asyncio.run(run())


def test_slow_compilation_times_out_and_is_cached(gated, monkeypatch):
    monkeypatch.setattr(structured_output, "MAX_SECONDS", 0.01)

    async def run():
        with refused(ApiError, "0.01 s") as error:
            await gated.prepare(Grammar("regex", "a"), 1)
        assert error.value.status == 429
        gated.gate.set()
        while gated._compiling:
            await asyncio.sleep(0.01)
        assert await gated.prepare(Grammar("regex", "a"), 1)

    asyncio.run(run())
