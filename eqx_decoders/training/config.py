"""All settings of a training run: frozen dataclasses whose field docstrings are the command line's help."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from eqx_decoders.context import Execution
from eqx_decoders.data.config import DataConfig
from eqx_decoders.errors import CheckedFields, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.io.atomic_files import expand_paths
from eqx_decoders.training.lora_config import LORA_WEIGHTS, LoRASettings
from eqx_decoders.training.methods.distill_config import DistillConfig
from eqx_decoders.training.methods.method_kinds import check_groups, check_method
from eqx_decoders.training.methods.preference_config import PreferenceConfig, RewardConfig
from eqx_decoders.training.methods.rl_config import RLConfig
from eqx_decoders.training.objectives.preference_loss import KTOLoss
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig, make_schedule
from eqx_decoders.training.sampler_config import SamplerConfig, split_devices
from eqx_decoders.training.step_settings import ModelSettings, StepSettings


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
        rule = "must be a path: its lock and its metrics need a file system"
        local = "://" not in self.run_dir
        check(local, f"run_dir={self.run_dir!r} {rule}. Give a path, and checkpoint_dir={self.run_dir!r} beside it.")
        if self.export is not None and self.export_adapter is not None:
            one, other = Path(self.export).absolute(), Path(self.export_adapter).absolute()
            separate = one not in (other, *other.parents) and other not in one.parents
            text = f"export={self.export!r} and export_adapter={self.export_adapter!r}"
            check(separate, f"{text} must not be in one another: give two directories.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedModelSettings(ModelSettings):
    """Model, where its weights come from, and which of them are trained."""

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
        check(len(sources) < 2, f"{' and '.join(sources)} exclude each other: leave one out.")
        free = self.init_from is None or not self.set
        check(
            free, f"set={self.set} and init_from={self.init_from!r} exclude each other: its weights have their sizes."
        )
        sourced = self.init_from is not None or self.init_weights == ("*",)
        check(sourced, f"init_weights={self.init_weights} needs init_from, where they come from.")


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
    """What a run learns from its data."""

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
    """Processes of a run, and how it is observed."""

    checked_name = ""
    distributed: bool = False
    """This is one of several processes, as a rule one on each host, started with the same flags. JAX finds the others
    (Cloud TPUs, GKE, SLURM), or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID tell where they are."""
    distributed_timeout: PositiveInt = 300
    """Seconds in which all of them must have started."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] | None = None
    """Trackers of metrics besides metrics.jsonl; None: tensorboard, if tensorboardX is installed."""
    profile: tuple[int, int] | None = None
    """First and last step of a trace, written to `<run-dir>/profile`."""
    peak_tflops: PositiveFloat | None = None
    """10^12 operations a second that a device can do (a CPU's all count as one), for mfu; None: its data sheet's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(ProcessSettings, MethodSettings, StepSettings, DataSettings, TrainedModelSettings, RunSettings):
    """Train a decoder. Started again on the same run directory, the run is resumed."""

    def __post_init__(self):
        super().__post_init__()
        if self.profile is not None:
            first, last = self.profile
            good = 0 < first <= last <= self.steps
            check(
                good,
                f"profile={self.profile} must be a first and a last step, counted from 1, up to steps={self.steps}.",
            )
        adapted = self.lora.rank is not None or self.export_adapter is None
        check(adapted, f"export_adapter={self.export_adapter!r} needs lora.rank: the run trains no adapter.")
        patterns = self.optimizer.trainable
        free = self.lora.rank is None or patterns == ("*",)
        check(free, f"optimizer.trainable={patterns} and lora.rank={self.lora.rank} exclude each other: leave one out.")
        self.check_rows(self.data.batch_size)
        check_method(self)
        make_schedule(self.optimizer, self.steps)

    def optimizer_config(self) -> OptimizerConfig:
        """Return `optimizer`, which in a LoRA run moves the pairs only."""
        if self.lora.rank is None:
            return self.optimizer
        scores = ("head.kernel",) if self.method == "reward" else ()  # new, as the pairs are
        return dataclasses.replace(self.optimizer, trainable=(*LORA_WEIGHTS, *scores))

    def execution(self, devices: Sequence[Any] | None = None) -> Execution:
        """Make layout, dtypes and remat of these devices, or of all devices of this program that train."""
        rows = None if self.describe else self.data.batch_size
        if self.sampler.devices and devices is None:
            devices, _ = split_devices(self.sampler.devices)
        return self.step_execution(rows, devices, abstract=self.describe)
