"""The start of a run whose model draws answers: its prompts, its engine, and what it computes beside its steps."""

import functools
from typing import Any

import jax

from eqx_decoders.data.dataset import written_by
from eqx_decoders.data.prompt_batches import PromptBatches, read_prompts
from eqx_decoders.errors import DataError, check
from eqx_decoders.io.coordination import from_first
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.rl.answerer import Answerer, ends_of_answers
from eqx_decoders.rl.on_policy import OnPolicyRun
from eqx_decoders.rl.rl_run import RLRun
from eqx_decoders.serving.engine.config import EngineConfig
from eqx_decoders.serving.engine.engine import Engine
from eqx_decoders.training.methods.method import MethodStart, OpenedMethod
from eqx_decoders.training.methods.rl_config import RLConfig


LARGEST_CHUNK = 128  # tokens of prompts that are prefilled at once


def open_rl(start: MethodStart) -> OpenedMethod:
    """Read the prompts of a run, and the held-out ones, if there is a `held_out_path`; import its reward."""
    return _opened(start, RLRun)


def open_on_policy(start: MethodStart) -> OpenedMethod:
    """Read the prompts of a run, and the held-out ones, and load its teacher."""
    return _opened(start, OnPolicyRun)


def _opened(start: MethodStart, run: type[RLRun]) -> OpenedMethod:
    start.check_text_alone()
    config, data, tokenizer = start.config, start.config.dataset, start.tokenizer
    template, rl = written_by(data, start.options["template"], tokenizer), config.rl

    def prompts(path: Any, flag: str, *, held_out: bool = False) -> PromptBatches:
        most = data.seq_len - rl.max_new_tokens
        read = read_prompts(path, tokenizer, most_tokens=most, template=template, flag=flag)
        return PromptBatches(read, count=rl.prompts, seed=data.seed, held_out=held_out)

    trained = prompts(data.path, "--data")
    sets = {} if data.held_out_path is None else {"": prompts(data.held_out_path, "--held-out", held_out=True)}
    hashes = [each.prompts.content_hash for each in (trained, *sets.values())]
    rule = f"the prompts of process {jax.process_index()} are others than those of the first"
    check(hashes == from_first("made", hashes), f"{rule}: all must read the same files.", DataError)
    longest = max(each.prompts.longest for each in (trained, *sets.values()))
    _check_room(config, longest)
    stop_ids = ends_of_answers(tokenizer, template, start.target.generation_config.stop_ids)
    new_engine = functools.partial(_new_engine, config=_engine_config(rl, longest))
    answerer = Answerer(rl, tokenizer, stop_ids=stop_ids, new_engine=new_engine)
    method = run(start, trained, answerer)
    start.stack.callback(method.close)
    return OpenedMethod(trained, sets, method)


def _engine_config(rl: RLConfig, longest: int) -> EngineConfig:
    """Return the sizes of an engine for prompts of up to `longest` tokens."""
    chunk = min(LARGEST_CHUNK, max(16, 1 << (longest - 1).bit_length()))
    slots = min(rl.slots, rl.prompts * rl.samples)
    length, budget = longest + rl.max_new_tokens, slots + 4 * chunk
    sizes: dict[str, Any] = dict(max_length=length, prefill_chunk=chunk, token_budget=budget)
    return EngineConfig(max_batch_size=slots, max_logprobs=0, max_logit_bias=0, **sizes)


def _new_engine(model: Decoder, config: EngineConfig) -> Engine:
    engine = Engine(model, config)
    engine.warm_up()
    return engine


def _check_room(config: Any, longest: int) -> None:
    """Raise ConfigError unless the longest answers to the longest prompts would fit into a batch."""
    rl, data = config.rl, config.dataset
    in_row = min(rl.answers_per_row, data.seq_len // (longest + rl.max_new_tokens))
    needed = -(-rl.prompts * rl.samples // in_row)
    rule = f"rl.prompts={rl.prompts} x rl.samples={rl.samples} answers of up to {longest} + {rl.max_new_tokens} tokens"
    remedy = f"raise it, or dataset.seq_len={data.seq_len}, or draw fewer"
    check(needed <= data.batch_size, f"{rule} need dataset.batch_size={needed}, not {data.batch_size}: {remedy}.")
