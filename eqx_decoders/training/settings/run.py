"""All settings of a training run. The docstrings of the fields are the help texts of the command line."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from eqx_decoders.context import Execution
from eqx_decoders.data.config import DataConfig
from eqx_decoders.errors import CheckedFields, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.io.atomic_files import expand_paths
from eqx_decoders.training.objectives.preference_loss import KTOLoss
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig, make_schedule
from eqx_decoders.training.settings.distill import DistillConfig
from eqx_decoders.training.settings.lora import LORA_WEIGHTS, LoRASettings
from eqx_decoders.training.settings.methods import check_groups, check_method
from eqx_decoders.training.settings.preference import PreferenceConfig, RewardConfig
from eqx_decoders.training.settings.rl import RLConfig
from eqx_decoders.training.settings.sampler import SamplerConfig, split_devices
from eqx_decoders.training.settings.step import ModelSettings, StepSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(CheckedFields):
    """Directories of a run, its length and its checkpoints."""

    checked_name = ""
    run_dir: str = "runs/tiny"
    """Directory for checkpoints, metrics.jsonl, the tokenizer and plots."""
    checkpoint_dir: str | None = None
    """Directory for checkpoints instead of <run-dir>/checkpoints: a path or gs://bucket/path. Small files of the run
    are also copied there, so that a new machine with an empty run directory can resume the run."""
    config: str | None = None
    """YAML or JSON file of settings, named like the flags or as in a run's settings.json. Flags take precedence."""
    steps: PositiveInt = 400
    """Number of optimizer steps."""
    epochs: PositiveFloat | None = None
    """Number of passes over the training data, instead of steps. The number of steps is computed when the run starts,
    and is saved as steps. Not with method=rl."""
    allow_changes: bool = False
    """Resume a run although its optimizer, batch_size, step.z_loss or mixture weights have changed."""
    checkpoint_every: PositiveInt = 100
    """Steps between checkpoints."""
    max_checkpoints: PositiveInt = 3
    """Number of checkpoints to keep. One more is kept until a step with a finite loss has followed the newest."""
    max_skipped: PositiveInt = 10
    """Maximum number of consecutive steps whose loss or gradient is not finite. Such steps change no weight; after more
    of them the run ends."""
    export: str | None = None
    """Directory for the trained model at the end of the run, in the format of `from_pretrained`. Adapters are merged.
    With `optimizer.ema_decay`, the EMA weights are exported."""
    export_adapter: str | None = None
    """Directory for the trained adapter at the end of the run, in the format of PEFT."""
    describe: bool = False
    """Print the weights of the model (path, shape, axes, sharding, bytes) and exit."""
    describe_data: bool = False
    """Print some training documents, with the training targets marked, and exit."""
    list_models: bool = False
    """Print the names of the models and exit."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "run_dir", "checkpoint_dir", "config", "export", "export_adapter")
        check(
            "://" not in self.run_dir,
            f"run_dir={self.run_dir!r} must be a path in a file system, for the lock and the metrics of the run. Set "
            f"run_dir to a path, and checkpoint_dir={self.run_dir!r}.",
        )
        if self.export is not None and self.export_adapter is not None:
            one, other = Path(self.export).absolute(), Path(self.export_adapter).absolute()
            check(
                one not in (other, *other.parents) and other not in one.parents,
                f"export={self.export!r} and export_adapter={self.export_adapter!r} must be separate directories: "
                "neither may contain the other.",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedModelSettings(ModelSettings):
    """Model of a run, its initial weights, and its adapters."""

    init_from: str | None = None
    """Checkpoint to start from: a directory in Hugging Face's format, or "org/name" on the hub. It determines the
    model."""
    init_weights: tuple[str, ...] = ("*",)
    """Path patterns of the weights that are loaded from init_from. The other weights are newly initialized."""
    lora: LoRASettings = LoRASettings()

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "init_from")
        sources = {"model": None if self.model == "tiny" else self.model}
        sources |= {name: getattr(self, name) for name in ("model_config", "init_from")}
        sources = [f"{name}={value!r}" for name, value in sources.items() if value is not None]
        check(len(sources) < 2, f"{' and '.join(sources)} exclude each other: set only one of them.")
        check(
            self.init_from is None or not self.set,
            f"set={self.set} and init_from={self.init_from!r} exclude each other: the checkpoint determines the sizes.",
        )
        check(
            self.init_from is not None or self.init_weights == ("*",),
            f"init_weights={self.init_weights} needs init_from, the checkpoint that contains these weights.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(CheckedFields):
    """Data, tokenizer, held-out evaluations and samples."""

    checked_name = ""
    data: DataConfig = DataConfig()
    tokenizer: str | None = None
    """Tokenizer: "bpe", trained on the text of the run; "bytes"; or the path of a tokenizer.json. None: the tokenizer
    of init_from, otherwise bpe."""
    bpe_vocab_size: PositiveInt | None = None
    """Vocabulary size of a trained tokenizer, at most the model's vocab_size. None: the model's vocab_size."""
    eval_every: NonNegativeInt = 100
    """Steps between evaluations on held-out data. Each also prints a sample. 0: only at the end."""
    eval_batches: PositiveInt = 16
    """Number of batches of each held-out set in an evaluation during the run. The first batches are used."""
    final_eval_batches: PositiveInt | None = None
    """Number of batches of each held-out set in the final evaluation. None: all batches."""
    eval_tasks: tuple[str, ...] = ()
    """Tasks that are evaluated during the run: file.py:name, or lm-eval:name (extra lm-eval), as for
    scripts/evaluate.py. Greedy completions are graded. The evaluation does not change the run."""
    eval_task_examples: PositiveInt = 32
    """Number of examples of each task in an evaluation during the run. The first examples are used. The final
    evaluation uses all."""
    sample_tokens: NonNegativeInt = 120
    """Number of tokens of a sample. 0: no samples."""
    prompt: str = "class Reader:\n    def"
    """Prompt of samples."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "tokenizer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodSettings(CheckedFields):
    """Training method of a run, and its settings."""

    checked_name = ""
    method: Literal["sft", "dpo", "kto", "reward", "rl", "distill"] = "sft"
    """Training method. sft: next-token prediction on texts and conversations; dpo: preference pairs, with the loss
    `preference.kind`; kto: completions labeled desirable or undesirable; reward: a reward model, from preference
    pairs; rl: sampled completions with rewards from a program; distill: imitation of a teacher's token
    distributions."""
    preference: PreferenceConfig = PreferenceConfig()
    kto: KTOLoss = KTOLoss()
    reward: RewardConfig = RewardConfig()
    distill: DistillConfig = DistillConfig()
    rl: RLConfig = RLConfig()
    sampler: SamplerConfig = SamplerConfig()

    def __post_init__(self):
        super().__post_init__()
        check_groups(self.method, {name: getattr(self, name) for name in METHOD_GROUPS})


METHOD_GROUPS = tuple(field.name for field in dataclasses.fields(MethodSettings) if field.name != "method")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSettings(CheckedFields):
    """Processes of a run, trackers of its metrics, and its profile."""

    checked_name = ""
    distributed: bool = False
    """Connect several processes, one per host, which are started with the same flags. JAX detects them on Cloud TPUs,
    GKE and SLURM. Elsewhere set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."""
    distributed_timeout: PositiveInt = 300
    """Maximum number of seconds until all processes have started."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] | None = None
    """Trackers of metrics, in addition to metrics.jsonl. None: tensorboard, if tensorboardX is installed."""
    profile: tuple[int, int] | None = None
    """First and last step of a profiler trace, which is written to `<run-dir>/profile`."""
    peak_tflops: PositiveFloat | None = None
    """Peak performance of a device in TFLOP/s, for the metric mfu. All cores of a CPU are one device. None: the value
    of the data sheet, if it is known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(ProcessSettings, MethodSettings, StepSettings, DataSettings, TrainedModelSettings, RunSettings):
    """Settings of a training run. If the run directory contains a run, it is resumed."""

    def __post_init__(self):
        super().__post_init__()
        if self.profile is not None:
            first, last = self.profile
            check(
                0 < first <= last <= self.steps,
                f"profile={self.profile} must be a first and a last step, counted from 1, up to steps={self.steps}.",
            )
        check(
            self.lora.rank is not None or self.export_adapter is None,
            f"export_adapter={self.export_adapter!r} needs lora.rank: the run trains no adapter.",
        )
        patterns = self.optimizer.trainable
        check(
            self.lora.rank is None or patterns == ("*",),
            f"optimizer.trainable={patterns} and lora.rank={self.lora.rank} exclude each other: set only one of them.",
        )
        self.check_rows(self.data.batch_size)
        check_method(self)
        make_schedule(self.optimizer, self.steps)

    def optimizer_config(self) -> OptimizerConfig:
        """Return the settings of the optimizer. With `lora.rank`, only adapters are trained."""
        if self.lora.rank is None:
            return self.optimizer
        score_head = ("head.kernel",) if self.method == "reward" else ()
        return dataclasses.replace(self.optimizer, trainable=(*LORA_WEIGHTS, *score_head))

    def execution(self, devices: Sequence[Any] | None = None) -> Execution:
        """Return the layout, dtypes and remat policy of the steps. `devices`: all devices that train by default."""
        rows = None if self.describe else self.data.batch_size
        if self.sampler.devices and devices is None:
            devices, _ = split_devices(self.sampler.devices)
        return self.step_execution(rows, devices, abstract=self.describe)
