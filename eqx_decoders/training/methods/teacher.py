"""The teacher of a run: a model with the same tokens."""

from eqx_decoders.context import Execution
from eqx_decoders.errors import check
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import load_hf
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from eqx_decoders.model.decoder import Decoder


def load_teacher(source: str, tokenizer: Tokenizer, execution: Execution, field: str = "distill.teacher") -> Decoder:
    """Load the teacher of a run, which `field` names. Raises ConfigError for one with another vocabulary."""
    with StatusLine(f"loading the teacher {source}", remains="what was downloaded is kept"):
        check_same_tokens(tokenizer, load_tokenizer(resolve(source).path), source, field)
        return load_hf(source, **vars(execution))


def check_same_tokens(tokenizer: Tokenizer, teachers: Tokenizer, source: str, field: str = "distill.teacher") -> None:
    """Raise ConfigError unless both tokenizers give every id the same token; their rules to cut texts may differ."""
    if tokenizer.content_hash == teachers.content_hash:
        return
    rule = f"{field}={source!r} has another vocabulary"
    remedy = (
        "Its distributions are over other tokens: take a teacher with the student's tokenizer, or train on its texts"
    )
    named = isinstance(tokenizer, JsonTokenizer) and isinstance(teachers, JsonTokenizer)
    check(named, f"{rule}: a {type(teachers).__name__}, and not a {type(tokenizer).__name__}. {remedy}.")
    assert isinstance(tokenizer, JsonTokenizer) and isinstance(teachers, JsonTokenizer)
    for index in range(max(tokenizer.vocab_size, teachers.vocab_size)):
        one, other = tokenizer.name_of(index), teachers.name_of(index)
        check(one == other, f"{rule}: id {index} is {other!r}, and the student's {one!r}. {remedy}.")
