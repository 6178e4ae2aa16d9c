"""Data of method sft: texts and conversations. Method distill reads them, too."""

import contextlib

import jax

from eqx_decoders.data.batches import Batches
from eqx_decoders.data.dataset import make_dataset, make_held_out_sets
from eqx_decoders.encoders.media_config import placeholders
from eqx_decoders.io.processes import LONG_TIMEOUT, all_gather_json, check_same
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.training.methods.method import MethodStart, OpenedMethod


def open_texts(start: MethodStart) -> OpenedMethod:
    """Open the tokenized texts of a run and of each held-out set. All processes tokenize them together."""
    data = start.stack.enter_context(make_dataset(start.data, start.tokenizer, **start.options))
    held_out = make_held_out_sets(start.data, start.tokenizer, **start.options)
    for batches in held_out.values():
        start.stack.enter_context(batches)
    _check_tokens(start.tokenizer, [data, *held_out.values()], start.target)
    return OpenedMethod(data, held_out)


def _check_tokens(tokenizer: Tokenizer, sets: list[Batches], target: Decoder) -> None:
    """Raise DataError unless the ids fit the model and all processes have the same tokens."""
    single = jax.process_count() == 1
    with contextlib.nullcontext() if single else StatusLine("waiting for the other processes (tokens)"):
        all_gather_json("tokens", seconds=LONG_TIMEOUT)
    parts = [part for batches in sets for part in batches.parts]
    if tokenizer.vocab_size > target.config.vocab_size:
        for store in {id(part.store): part.store for part in parts}.values():
            store.check_ids(target.config.vocab_size, placeholders(target.config.media))
    hashes = [tokenizer.content_hash, *(part.store.content_hash for part in parts)]
    check_same("tokenizer and tokens", hashes, "run_dir must be a directory that they share")
