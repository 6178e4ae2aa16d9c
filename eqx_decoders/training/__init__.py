"""Training: data, loss, optimizers, the compiled step, evaluation, and runs.

Train
    `Trainer` compiles the step of a model with an `OptimizerConfig` and a `StepConfig`; it returns a `TrainState` and
    `StepMetrics`. `next_token_loss` (`LossMetrics`) and `token_loss_sum` are its losses; `make_optimizer` and
    `make_schedule` make optax's.

Read data
    `DataConfig`, `make_dataset` and `make_held_out_sets` make `Batches` of `Batch`es from files; `host_rows` and
    `place` divide them over processes, `connected` joins processes.

Read and write text
    `load_tokenizer`, `Tokenizer`, `ByteTokenizer`; `prompt_ids`, `StreamDecoder`.

Evaluate
    `HeldOut`, `evaluate`, `evaluate_sets`, `sample_text`.

Fine-tune
    `LoRAConfig`, `add_lora`, `merge_lora`, and `LORA_WEIGHTS`, the pattern of the pairs.

Align, reward, distil
    `Signals` are what an objective reads beside the tokens of a `Batch`; `PairObjective` (`PairLoss`), `KTOObjective`
    (`KTOLoss`), `PolicyObjective` (`PolicyLoss`, `Correction`), `ValueObjective`, `RewardObjective` and
    `DistillObjective` are losses of a `Trainer`. `reward_scores`, `token_values`, `top_tokens`, `token_log_probs`,
    `linear_log_probs`, `linear_divergence` and `top_divergence` (`Divergence`, `HeadForm`, `HeadWeights`) compute what
    they are made of, `token_weights`, `group_advantages`, `generalized_advantages` and `whiten` what signals hold.

Run
    `train` starts or resumes the run of a `TrainConfig` in its run directory. `load_run` loads the model of a run,
    `load_text_run` also its tokenizer.
"""

from typing import TYPE_CHECKING

from eqx_decoders.core.lazy_imports import lazy


# Imported at their first use: optax and orbax are slow to import, and a layer needs neither.
if TYPE_CHECKING:
    from eqx_decoders.data.batch import Batch as Batch
    from eqx_decoders.data.batches import Batches as Batches
    from eqx_decoders.data.config import DataConfig as DataConfig
    from eqx_decoders.data.dataset import make_dataset as make_dataset, make_held_out_sets as make_held_out_sets
    from eqx_decoders.data.host_rows import host_rows as host_rows, place as place
    from eqx_decoders.data.signals import Signals as Signals
    from eqx_decoders.inference.stream_decoder import StreamDecoder as StreamDecoder
    from eqx_decoders.io.processes import connected as connected
    from eqx_decoders.io.text.tokenizer import (
        ByteTokenizer as ByteTokenizer,
        Tokenizer as Tokenizer,
        load_tokenizer as load_tokenizer,
        prompt_ids as prompt_ids,
    )
    from eqx_decoders.rl.methods import train as train
    from eqx_decoders.training.evaluation import (
        evaluate as evaluate,
        evaluate_sets as evaluate_sets,
        sample_text as sample_text,
    )
    from eqx_decoders.training.head.divergence import (
        Divergence as Divergence,
        linear_divergence as linear_divergence,
        top_divergence as top_divergence,
    )
    from eqx_decoders.training.head.head_tiles import HeadForm as HeadForm
    from eqx_decoders.training.head.log_probs import linear_log_probs as linear_log_probs
    from eqx_decoders.training.head.vocab_parallel import HeadWeights as HeadWeights
    from eqx_decoders.training.held_out import HeldOut as HeldOut
    from eqx_decoders.training.lora import add_lora as add_lora, merge_lora as merge_lora
    from eqx_decoders.training.objectives.advantages import (
        generalized_advantages as generalized_advantages,
        group_advantages as group_advantages,
        token_weights as token_weights,
        whiten as whiten,
    )
    from eqx_decoders.training.objectives.distillation import (
        DistillObjective as DistillObjective,
        top_tokens as top_tokens,
    )
    from eqx_decoders.training.objectives.objectives import (
        KTOObjective as KTOObjective,
        PairObjective as PairObjective,
        PolicyObjective as PolicyObjective,
    )
    from eqx_decoders.training.objectives.policy_loss import Correction as Correction, PolicyLoss as PolicyLoss
    from eqx_decoders.training.objectives.preference_loss import KTOLoss as KTOLoss, PairLoss as PairLoss
    from eqx_decoders.training.objectives.scores import (
        RewardObjective as RewardObjective,
        ValueObjective as ValueObjective,
        reward_scores as reward_scores,
        token_values as token_values,
    )
    from eqx_decoders.training.objectives.token_log_probs import token_log_probs as token_log_probs
    from eqx_decoders.training.optimizer.optimizer import (
        OptimizerConfig as OptimizerConfig,
        make_optimizer as make_optimizer,
        make_schedule as make_schedule,
    )
    from eqx_decoders.training.run.load_export import load_run as load_run, load_text_run as load_text_run
    from eqx_decoders.training.settings.lora import LORA_WEIGHTS as LORA_WEIGHTS, LoRAConfig as LoRAConfig
    from eqx_decoders.training.settings.run import TrainConfig as TrainConfig
    from eqx_decoders.training.step.loss import next_token_loss as next_token_loss, token_loss_sum as token_loss_sum
    from eqx_decoders.training.step.loss_metrics import LossMetrics as LossMetrics
    from eqx_decoders.training.step.step import Trainer as Trainer
    from eqx_decoders.training.step.step_config import StepConfig as StepConfig
    from eqx_decoders.training.step.train_state import StepMetrics as StepMetrics, TrainState as TrainState

__getattr__, __all__, __dir__ = lazy(
    __name__,
    {
        "inference.stream_decoder": "StreamDecoder",
        "io.processes": "connected",
        "io.text.tokenizer": "ByteTokenizer Tokenizer load_tokenizer prompt_ids",
        "data.batch": "Batch",
        "data.batches": "Batches",
        "data.config": "DataConfig",
        "data.dataset": "make_dataset make_held_out_sets",
        "training.settings.run": "TrainConfig",
        "training.evaluation": "evaluate evaluate_sets sample_text",
        "training.held_out": "HeldOut",
        "training.lora": "add_lora merge_lora",
        "training.settings.lora": "LORA_WEIGHTS LoRAConfig",
        "training.step.loss": "next_token_loss token_loss_sum",
        "data.signals": "Signals",
        "training.head.divergence": "Divergence linear_divergence top_divergence",
        "training.head.head_tiles": "HeadForm",
        "training.head.log_probs": "linear_log_probs",
        "training.head.vocab_parallel": "HeadWeights",
        "training.objectives.advantages": "generalized_advantages group_advantages token_weights whiten",
        "training.objectives.distillation": "DistillObjective top_tokens",
        "training.objectives.objectives": "KTOObjective PairObjective PolicyObjective",
        "training.objectives.policy_loss": "Correction PolicyLoss",
        "training.objectives.preference_loss": "KTOLoss PairLoss",
        "training.objectives.scores": "RewardObjective ValueObjective reward_scores token_values",
        "training.objectives.token_log_probs": "token_log_probs",
        "training.step.loss_metrics": "LossMetrics",
        "training.optimizer.optimizer": "OptimizerConfig make_optimizer make_schedule",
        "data.host_rows": "host_rows place",
        "rl.methods": "train",  # with the methods of all packages
        "training.run.load_export": "load_run load_text_run",
        "training.step.step": "Trainer",
        "training.step.step_config": "StepConfig",
        "training.step.train_state": "StepMetrics TrainState",
    },
)
