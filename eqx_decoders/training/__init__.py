"""Training: loss, optimizers, the compiled step, data, evaluation. `run` is the loop around them."""

from typing import TYPE_CHECKING

from eqx_decoders.core.lazy_imports import lazy


# Read when they are asked for: optax and orbax are slow to import, and who takes a layer needs neither.
if TYPE_CHECKING:
    from eqx_decoders.data.batches import Batch as Batch, Batches as Batches
    from eqx_decoders.data.dataset import (
        DataConfig as DataConfig,
        make_dataset as make_dataset,
        make_held_out_sets as make_held_out_sets,
    )
    from eqx_decoders.data.host_rows import host_rows as host_rows, place as place
    from eqx_decoders.inference.text_model import StreamDecoder as StreamDecoder, prompt_ids as prompt_ids
    from eqx_decoders.io.coordination import connected as connected
    from eqx_decoders.io.text.tokenizer import (
        ByteTokenizer as ByteTokenizer,
        Tokenizer as Tokenizer,
        load_tokenizer as load_tokenizer,
    )
    from eqx_decoders.training.evaluation import (
        HeldOut as HeldOut,
        evaluate as evaluate,
        evaluate_sets as evaluate_sets,
        sample_text as sample_text,
    )
    from eqx_decoders.training.lora import (
        LORA_WEIGHTS as LORA_WEIGHTS,
        LoRAConfig as LoRAConfig,
        add_lora as add_lora,
        merge_lora as merge_lora,
    )
    from eqx_decoders.training.optimizer.optimizer import (
        OptimizerConfig as OptimizerConfig,
        make_optimizer as make_optimizer,
        make_schedule as make_schedule,
    )
    from eqx_decoders.training.run.run_directory import load_run as load_run
    from eqx_decoders.training.step.loss import (
        LossMetrics as LossMetrics,
        next_token_loss as next_token_loss,
        token_loss_sum as token_loss_sum,
    )
    from eqx_decoders.training.step.step import (
        StepConfig as StepConfig,
        StepMetrics as StepMetrics,
        Trainer as Trainer,
        TrainState as TrainState,
    )

__getattr__, _late = lazy(
    __name__,
    {
        "inference.text_model": "StreamDecoder prompt_ids",
        "io.coordination": "connected",
        "io.text.tokenizer": "ByteTokenizer Tokenizer load_tokenizer",
        "data.batches": "Batch Batches",
        "data.dataset": "DataConfig make_dataset make_held_out_sets",
        "training.evaluation": "HeldOut evaluate evaluate_sets sample_text",
        "training.lora": "LORA_WEIGHTS LoRAConfig add_lora merge_lora",
        "training.step.loss": "LossMetrics next_token_loss token_loss_sum",
        "training.optimizer.optimizer": "OptimizerConfig make_optimizer make_schedule",
        "data.host_rows": "host_rows place",
        "training.run.run_directory": "load_run",
        "training.step.step": "StepConfig StepMetrics Trainer TrainState",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *_late})
