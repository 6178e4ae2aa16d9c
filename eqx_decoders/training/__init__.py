"""Training: loss, optimizers, the compiled step, data, evaluation. `run` is the loop around them."""

from eqx_decoders.inference.text import StreamDecoder, prompt_ids
from eqx_decoders.io.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from eqx_decoders.training.data import Batch, DataConfig, make_dataset
from eqx_decoders.training.evaluate import HeldOut, evaluate, sample_text
from eqx_decoders.training.lora import LORA_WEIGHTS, LoRAConfig, add_lora, merge_lora
from eqx_decoders.training.loss import LossMetrics, next_token_loss, token_loss_sum
from eqx_decoders.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from eqx_decoders.training.processes import place
from eqx_decoders.training.runs import load_run
from eqx_decoders.training.step import StepConfig, StepMetrics, Trainer, TrainState


__all__ = [
    "LORA_WEIGHTS",
    "Batch",
    "ByteTokenizer",
    "DataConfig",
    "HeldOut",
    "LoRAConfig",
    "LossMetrics",
    "OptimizerConfig",
    "StepConfig",
    "StepMetrics",
    "StreamDecoder",
    "Tokenizer",
    "TrainState",
    "Trainer",
    "add_lora",
    "evaluate",
    "load_run",
    "load_tokenizer",
    "make_dataset",
    "make_optimizer",
    "make_schedule",
    "merge_lora",
    "next_token_loss",
    "place",
    "prompt_ids",
    "sample_text",
    "token_loss_sum",
]
