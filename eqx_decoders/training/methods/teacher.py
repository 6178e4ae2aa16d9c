"""The teacher of a run: a model with the same tokens."""

from eqx_decoders.context import Execution
from eqx_decoders.errors import ConfigError, check
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.huggingface.load import load_hf
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer
from eqx_decoders.model.decoder import Decoder


def load_teacher(source: str, tokenizer: Tokenizer, execution: Execution, field: str = "distill.teacher") -> Decoder:
    """Load the teacher of a run, which `field` names. Raises ConfigError for one with another vocabulary."""
    with StatusLine(f"loading the teacher {source}", remains="what was downloaded is kept"):
        remedy = "Its distributions are over other tokens: take a teacher with the student's tokenizer"
        remedy += ", or train on its texts"
        name = f"{field}={source!r}"
        check_same_tokens(tokenizer, load_tokenizer(resolve(source).path), name, "the student's", remedy)
        return load_hf(source, **vars(execution))


def check_same_tokens(tokenizer: Tokenizer, others: Tokenizer, name: str, whose: str, remedy: str) -> None:
    """Raise ConfigError unless both tokenizers give every id the same token; their rules to cut texts may differ.

    `name`: of the model of the other one; `whose`: of the model with the first one, such as "the student's".
    """
    if tokenizer.content_hash == others.content_hash:
        return
    rule = f"{name} has another vocabulary"
    if not (isinstance(tokenizer, JsonTokenizer) and isinstance(others, JsonTokenizer)):
        raise ConfigError(f"{rule}: a {type(others).__name__}, and not a {type(tokenizer).__name__}. {remedy}.")
    for index in range(max(tokenizer.vocab_size, others.vocab_size)):
        one, other = tokenizer.name_of(index), others.name_of(index)
        check(one == other, f"{rule}: id {index} is {other!r}, and {whose} {one!r}. {remedy}.")
