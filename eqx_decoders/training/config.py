"""All settings of a training run: frozen dataclasses whose field docstrings are the command line's help."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from eqx_decoders.context import Execution
from eqx_decoders.data.config import DataConfig
from eqx_decoders.errors import CheckedFields, NonNegativeInt, PositiveFloat, PositiveInt, check
from eqx_decoders.io.atomic_files import expand_paths
from eqx_decoders.training.lora_config import LORA_WEIGHTS, LoRAConfig
from eqx_decoders.training.methods.distill_config import DistillConfig
from eqx_decoders.training.methods.method_kinds import check_groups, check_method
from eqx_decoders.training.methods.preference_config import PreferenceConfig
from eqx_decoders.training.methods.reward_config import RewardConfig
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
    """Directory for checkpoints, metrics.jsonl, tokenizer and images of losses and of experts' loads."""
    checkpoint_dir: str | None = None
    """Directory for checkpoints instead of <run-dir>/checkpoints: gs://bucket/path, or a path. Small files of the run
    are copied there, too, so that a new machine with an empty run directory goes on."""
    config: str | None = None
    """YAML or JSON file of settings, in the names of flags or of a run's settings.json; flags come before it."""
    steps: PositiveInt = 400
    """Optimizer steps in all."""
    allow_changes: bool = False
    """Go on with a run although its optimizer, batch_size, step.z_loss or weights of a mixture were others."""
    checkpoint_every: PositiveInt = 100
    """Steps between checkpoints."""
    max_checkpoints: PositiveInt = 3
    """Checkpoints to keep, and one more until a finite step has followed the newest."""
    max_skipped: PositiveInt = 10
    """Steps in a row that may have a loss or gradient that is not finite (they change nothing) before the run ends."""
    export: str | None = None
    """Directory for the trained model in the end, as `from_pretrained` opens it; adapters are merged, and of
    `optimizer.ema_decay` it is the running means."""
    export_adapter: str | None = None
    """Directory for the trained adapters in the end, as PEFT opens it."""
    describe: bool = False
    """Print the model's weights (path, shape, axes, sharding, bytes) and exit."""
    describe_data: bool = False
    """Print some training documents, with the targets marked, and exit."""
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
    """Directory of a Hugging Face checkpoint, or "org/name", to start from; it determines the model."""
    init_weights: tuple[str, ...] = ("*",)
    """Patterns of the paths of the weights that are taken from there; the others are new."""
    lora_rank: int | None = None
    """Train only low-rank pairs of this rank for the weights of `lora_targets`; None: train the weights."""
    lora_alpha: float = 16.0
    """What a pair adds is multiplied by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ("*.mixer.query", "*.mixer.value")
    """Patterns of the paths of the weights that get a pair."""
    lora_rank_pattern: tuple[tuple[str, int], ...] = ()
    """Patterns of paths whose pairs have another rank, such as '*.mlp.*=16'; the first that matches counts."""
    lora_alpha_pattern: tuple[tuple[str, float], ...] = ()
    """The same with another lora_alpha."""
    lora_rank_stabilized: bool = False
    """Multiply by lora_alpha / sqrt(lora_rank) instead (rsLoRA)."""
    lora_dora: bool = False
    """Train the lengths of the columns of weights, too (DoRA)."""
    lora_init: Literal["zeros", "pissa"] = "zeros"
    """zeros: pairs add nothing at first; pissa: they are the largest singular values of their weights, taken out of
    these (PiSSA)."""

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
        self.lora()

    def lora(self) -> LoRAConfig | None:
        """Return the settings of the low-rank pairs, which are in float32; None for a run without them."""
        names = [field.name for field in dataclasses.fields(LoRAConfig) if field.name != "dtype"]
        settings = {name: getattr(self, f"lora_{name}") for name in names}
        if self.lora_rank is not None:
            return LoRAConfig(**settings, dtype="float32")
        for name in ("rank_pattern", "alpha_pattern", "rank_stabilized", "dora", "init"):
            unused = settings[name] == getattr(LoRAConfig, name)
            check(unused, f"lora_{name}={settings[name]!r} needs lora_rank: there are no pairs without.")
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(CheckedFields):
    """Data, tokenizer, held-out evaluations and samples."""

    checked_name = ""
    dataset: DataConfig = DataConfig()
    tokenizer: str | None = None
    """"bpe": trained on the run's own text; "bytes"; a path to a tokenizer.json; None: that of init_from, else bpe."""
    bpe_vocab_size: PositiveInt | None = None
    """Ids of a trained tokenizer, at most the model's vocab_size; None: just as many."""
    eval_every: NonNegativeInt = 100
    """Steps between held-out evaluations, each with a sample; 0: only at the end."""
    eval_batches: PositiveInt = 16
    """Batches of each held-out set, the first ones, in an evaluation during the run."""
    final_eval_batches: PositiveInt | None = None
    """The same for the evaluation at the end; None: all."""
    eval_tasks: tuple[str, ...] = ()
    """Tasks whose examples the model answers at each evaluation: file.py:name, or lm-eval:name (extra lm-eval), as
    scripts/evaluate.py takes them. Its most likely answers are graded; the run does not depend on them."""
    eval_task_examples: PositiveInt = 32
    """Examples of each task, the first ones, in an evaluation during the run; the one at the end takes all."""
    sample_tokens: NonNegativeInt = 120
    """Tokens of a sample; 0: none."""
    prompt: str = "class Reader:\n    def"
    """Beginning of samples."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "tokenizer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodSettings(CheckedFields):
    """What a run learns from its data."""

    checked_name = ""
    method: Literal["sft", "dpo", "kto", "reward", "rl", "distill"] = "sft"
    """sft: the next tokens of texts and conversations; dpo: pairs of answers, by one of the losses of
    `preference.kind`; kto: answers that are desirable or not; reward: a model that scores answers, from pairs; rl:
    answers that the model draws, and a program rewards; distill: what a teacher says of texts and conversations."""
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
        adapted = self.lora_rank is not None or self.export_adapter is None
        check(adapted, f"export_adapter={self.export_adapter!r} needs lora_rank: there are no adapters without.")
        patterns = self.optimizer.trainable
        free = self.lora_rank is None or patterns == ("*",)
        check(free, f"optimizer.trainable={patterns} and lora_rank={self.lora_rank} exclude each other: leave one out.")
        self.check_rows(self.dataset.batch_size)
        check_method(self)
        make_schedule(self.optimizer, self.steps)

    def optimizer_config(self) -> OptimizerConfig:
        """Return `optimizer`, which in a LoRA run moves the pairs only."""
        if self.lora_rank is None:
            return self.optimizer
        scores = ("head.kernel",) if self.method == "reward" else ()  # new, as the pairs are
        return dataclasses.replace(self.optimizer, trainable=(*LORA_WEIGHTS, *scores))

    def execution(self, devices: Sequence[Any] | None = None) -> Execution:
        """Make layout, dtypes and remat of these devices, or of all devices of this program that train."""
        rows = None if self.describe else self.dataset.batch_size
        if self.sampler.devices and devices is None:
            devices, _ = split_devices(self.sampler.devices)
        return self.step_execution(rows, devices, abstract=self.describe)
