"""All settings of a training run: frozen dataclasses whose field docstrings are the command line's help."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from eqx_decoders.context import ContextForm, ContextOrder, Execution
from eqx_decoders.data.config import DataConfig
from eqx_decoders.errors import check, check_integer, check_number, check_word
from eqx_decoders.families import list_models
from eqx_decoders.io.atomic_files import expand_paths
from eqx_decoders.layers.attention.kernels.registry import KERNELS
from eqx_decoders.numerics.low_precision import LowPrecision
from eqx_decoders.numerics.precision import Precision
from eqx_decoders.remat import POLICIES, Remat
from eqx_decoders.sharding.layout import Layout
from eqx_decoders.sharding.offload import Offload
from eqx_decoders.sharding.pipeline_config import Pipeline
from eqx_decoders.training.lora_config import LORA_WEIGHTS, LoRAConfig
from eqx_decoders.training.mesh_config import LowPrecisionConfig, MeshConfig, PipelineConfig
from eqx_decoders.training.optimizer.optimizer import OptimizerConfig, make_schedule
from eqx_decoders.training.run.trackers import PACKAGES
from eqx_decoders.training.step.step_config import StepConfig


_PATHS = ("run_dir", "checkpoint_dir", "config", "model_config", "init_from", "tokenizer", "export", "export_adapter")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a decoder. Started again on the same run directory, the run is resumed."""

    run_dir: str = "runs/tiny"
    """Directory for checkpoints, metrics.jsonl, tokenizer and images of losses and of experts' loads."""
    checkpoint_dir: str | None = None
    """Directory for checkpoints instead of <run-dir>/checkpoints: gs://bucket/path, or a path. Small files of the run
    are copied there, too, so that a new machine with an empty run directory goes on."""
    config: str | None = None
    """YAML or JSON file of settings, in the names of flags or of a run's settings.json; flags come before it."""
    model: str = "tiny"
    """Name of a model, as `--list-models` prints them."""
    model_config: str | None = None
    """Instead of model: JSON of a `DecoderConfig` (see its `to_json`), or a `config.json` of Hugging Face."""
    set: tuple[str, ...] = ()
    """Fields of the model to replace, such as num_layers=4 or mlp_dim=512 (see `config_json.with_fields`)."""
    init_from: str | None = None
    """Directory of a Hugging Face checkpoint, or "org/name", to start from; it determines the model."""
    init_weights: tuple[str, ...] = ("*",)
    """Patterns of the paths of the weights that are taken from there; the others are new."""
    export: str | None = None
    """Directory for the trained model in the end, as `from_pretrained` opens it; adapters are merged, and of
    `optimizer.ema_decay` it is the running means."""
    export_adapter: str | None = None
    """Directory for the trained adapters in the end, as PEFT opens it."""
    mtp_depths: int = 0
    """Depths of multi-token prediction to add to a model that has none; an export to Hugging Face leaves them out."""
    lora_rank: int | None = None
    """Train only low-rank pairs of this rank for the weights of `lora_targets`; None: train the weights."""
    lora_alpha: float = 16.0
    """What a pair adds is multiplied by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ("*.mixer.query", "*.mixer.value")
    """Patterns of the paths of the weights that get a pair."""
    steps: int = 400
    """Optimizer steps in all."""
    allow_changes: bool = False
    """Go on with a run although its optimizer, batch_size, step.z_loss or weights of a mixture were others."""
    dataset: DataConfig = DataConfig()
    tokenizer: str | None = None
    """"bpe": trained on the run's own text; "bytes"; a path to a tokenizer.json; None: that of init_from, else bpe."""
    bpe_vocab_size: int | None = None
    """Ids of a trained tokenizer, at most the model's vocab_size; None: just as many."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""
    max_checkpoints: int = 3
    """Checkpoints to keep, and one more until a finite step has followed the newest."""
    eval_every: int = 100
    """Steps between held-out evaluations, each with a sample; 0: only at the end."""
    eval_batches: int = 16
    """Batches of each held-out set, the first ones, in an evaluation during the run."""
    final_eval_batches: int | None = None
    """The same for the evaluation at the end; None: all."""
    sample_tokens: int = 120
    """Tokens of a sample; 0: none."""
    prompt: str = "class Reader:\n    def"
    """Beginning of samples."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of activations; auto: bfloat16 on TPU and GPU, float32 on CPU."""
    params_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights. bfloat16 has 8 bits: a step that moves a weight by less than 1/512 of it moves
    it not at all, so a small learning rate needs float32, or a running mean (`optimizer.ema_decay`) beside it."""
    remat: str = "none"
    """Rematerialization policy, or "custom" with the two lists below."""
    remat_save: tuple[str, ...] = ()
    """custom: names of tensors saved on the device."""
    remat_offload: tuple[str, ...] = ()
    """custom: names of tensors saved in the host's memory."""
    attention: str = "auto"
    """Attention kernel."""
    context_order: ContextOrder = Execution.context_order
    """Order of the tokens of rows that `mesh.context` splits. zigzag: each device has a piece from the front and one
    from the end, so that causal attention is as much work for all; for models of attention alone."""
    context_form: ContextForm = Execution.context_form
    """Exchange between devices that `mesh.context` splits rows over: keys and values of all tokens, or all tokens of
    some heads."""
    head_bytes: int = Execution.head_bytes
    """Memory of a device of a mesh for the output head's weights and their gradient in the loss; if they need more it
    goes through the vocabulary in parts, for a third more work there."""
    exchange_bytes: int = Execution.exchange_bytes
    """Memory of a device for the tokens that its experts get from others at a time."""
    batch_split: int = Execution.batch_split
    """Parts of a batch that pass each layer one behind the other, so that one's communication takes place during
    another's products; each device needs a multiple of so many sequences."""
    axis_types: Literal["auto", "explicit"] = "auto"
    """explicit: arrays' types say how the mesh splits them, for code of one's own around a run; steps are the same."""
    replicated_tolerance: float = 0.02
    """Share of the weights that may be whole along an axis of the mesh that splits others (norms and biases always
    are): a run with more is refused, if its model has ten million weights."""
    xla_flags: Literal["auto", "none"] = "auto"
    """Options of XLA on TPUs: auto, those that others use on such chips (see `cli.xla_flags`), but never one that
    LIBTPU_INIT_ARGS or XLA_FLAGS has; none: XLA's defaults."""
    peak_tflops: float | None = None
    """10^12 operations a second that a device can do (a CPU's all count as one), for mfu; None: its data sheet's."""
    layer_stats: bool = False
    """Write mean, deviation and share of zeros of each layer's activations to metrics.jsonl."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] | None = None
    """Trackers of metrics besides metrics.jsonl; None: tensorboard, if tensorboardX is installed."""
    describe: bool = False
    """Print the model's weights (path, shape, axes, sharding, bytes) and exit."""
    describe_data: bool = False
    """Print some training documents, with the targets marked, and exit."""
    max_skipped: int = 10
    """Steps in a row that may have a loss or gradient that is not finite (they change nothing) before the run ends."""
    distributed: bool = False
    """This is one of several processes, as a rule one on each host, started with the same flags. JAX finds the others
    (Cloud TPUs, GKE, SLURM), or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID tell where they are."""
    distributed_timeout: int = 300
    """Seconds in which all of them must have started."""
    profile: tuple[int, int] | None = None
    """First and last step of a trace, written to `<run-dir>/profile`."""
    list_models: bool = False
    """Print the names of the models and exit."""
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    low_precision: LowPrecisionConfig = LowPrecisionConfig()
    offload: Offload = Offload()
    optimizer: OptimizerConfig = OptimizerConfig()
    step: StepConfig = StepConfig()

    def __post_init__(self):
        expand_paths(self, *_PATHS)
        rule = "must be a path: its lock and its metrics need a file system"
        local = "://" not in self.run_dir
        check(local, f"run_dir={self.run_dir!r} {rule}. Give a path, and checkpoint_dir={self.run_dir!r} beside it.")
        check_word("model", self.model, list_models())
        for field in (
            "steps",
            "distributed_timeout",
            "checkpoint_every",
            "eval_batches",
            "max_checkpoints",
            "max_skipped",
        ):
            check_integer(field, getattr(self, field))
        for field in ("eval_every", "sample_tokens", "mtp_depths"):
            check_integer(field, getattr(self, field), 0)
        if self.peak_tflops is not None:
            check_number("peak_tflops", self.peak_tflops, above=0)
        for field in ("bpe_vocab_size", "final_eval_batches"):
            if getattr(self, field) is not None:
                check_integer(field, getattr(self, field))
        check_number("replicated_tolerance", self.replicated_tolerance, least=0)
        check_word("xla_flags", self.xla_flags, ("auto", "none"))
        check_word("axis_types", self.axis_types, ("auto", "explicit"))
        check_word("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        check_word("params_dtype", self.params_dtype, ("float32", "bfloat16"))
        check_word("remat", self.remat, (*POLICIES, "custom"))
        check_word("attention", self.attention, ("auto", *KERNELS))
        check_word("context_order", self.context_order, get_args(ContextOrder))
        check_word("context_form", self.context_form, get_args(ContextForm))
        for field in ("head_bytes", "exchange_bytes", "batch_split"):
            check_integer(field, getattr(self, field))
        for tracker in self.trackers or ():
            check_word("trackers", tracker, PACKAGES)
        custom = self.remat == "custom"
        check(
            custom or not (self.remat_save or self.remat_offload),
            f"remat={self.remat!r} has its own lists: remat_save and remat_offload need remat='custom'.",
        )
        if custom:
            Remat(save=self.remat_save, offload=self.remat_offload)
        piped = self.pipeline == PipelineConfig() or (self.mesh.stage != 1 and self.pipeline.microbatches is not None)
        check(piped, f"{self.pipeline} needs mesh.stage, the number of stages, and pipeline.microbatches: give both.")
        if self.profile is not None:
            first, last = self.profile
            good = 0 < first <= last <= self.steps
            check(
                good,
                f"profile={self.profile} must be a first and a last step, counted from 1, up to steps={self.steps}.",
            )
        rows, parts = self.dataset.batch_size, self.step.gradient_accumulation_steps
        check(rows % parts == 0, f"batch_size={rows} must be a multiple of step.gradient_accumulation_steps={parts}.")
        rounded = self.low_precision == LowPrecisionConfig() or self.low_precision.mode is not None
        check(rounded, f"{self.low_precision} needs low_precision.mode, such as 'int8': give it, too.")
        self._low_precision()
        self._check_model()
        make_schedule(self.optimizer, self.steps)

    def _check_model(self) -> None:
        """Check that the fields which choose the model and its trained weights do not contradict each other."""
        sources = {"model": None if self.model == "tiny" else self.model}
        sources |= {name: getattr(self, name) for name in ("model_config", "init_from")}
        sources = [f"{name}={value!r}" for name, value in sources.items() if value is not None]
        check(len(sources) < 2, f"{' and '.join(sources)} exclude each other: leave one out.")
        free = self.init_from is None or not self.set
        check(
            free, f"set={self.set} and init_from={self.init_from!r} exclude each other: its weights have their sizes."
        )
        taken = self.init_from is not None or self.init_weights == ("*",)
        check(taken, f"init_weights={self.init_weights} needs init_from, where they come from.")
        adapted = self.lora_rank is not None or self.export_adapter is None
        check(adapted, f"export_adapter={self.export_adapter!r} needs lora_rank: there are no adapters without.")
        if self.export is not None and self.export_adapter is not None:
            one, other = Path(self.export).absolute(), Path(self.export_adapter).absolute()
            separate = one not in (other, *other.parents) and other not in one.parents
            text = f"export={self.export!r} and export_adapter={self.export_adapter!r}"
            check(separate, f"{text} must not be in one another: give two directories.")
        patterns = self.optimizer.trainable
        free = self.lora_rank is None or patterns == ("*",)
        check(free, f"optimizer.trainable={patterns} and lora_rank={self.lora_rank} exclude each other: leave one out.")
        self.lora()

    def lora(self) -> LoRAConfig | None:
        """Return the settings of the low-rank pairs, which are in float32; None for a run without them."""
        if self.lora_rank is None:
            return None
        return LoRAConfig(rank=self.lora_rank, alpha=self.lora_alpha, targets=self.lora_targets, dtype="float32")

    def optimizer_config(self) -> OptimizerConfig:
        """Return `optimizer`, which in a LoRA run moves the pairs only."""
        if self.lora_rank is None:
            return self.optimizer
        return dataclasses.replace(self.optimizer, trainable=LORA_WEIGHTS)

    def execution(self, devices: Sequence[Any] | None = None) -> Execution:
        """Make layout, dtypes and remat of these devices, or of all devices of this program."""
        options: dict[str, Any] = {} if devices is None else {"devices": devices}
        options |= dict(abstract=self.describe, explicit=self.axis_types == "explicit", offload=self.offload)
        layout = Layout.create(**dataclasses.asdict(self.mesh), **options)
        split = [axis for axis in ("data", "fsdp", "fsdp_transpose", "expert") if layout.sizes[axis] > 1]
        parts = math.prod(layout.sizes[axis] for axis in split)
        count = self.step.gradient_accumulation_steps
        pieces = self.pipeline.microbatches or 1
        cut = f"batch_size={self.dataset.batch_size}" + f" / gradient_accumulation_steps={count}" * (count > 1)
        cut += f" / pipeline.microbatches={pieces}" * (pieces > 1)
        fits = self.describe or self.dataset.batch_size % (count * pieces * parts) == 0
        along = " x ".join(f"mesh.{axis}" for axis in split)
        check(fits, f"{cut} must be a multiple of {parts}, the devices along {along}.")
        compute = self.dtype
        if compute == "auto":
            compute = "float32" if layout.platform == "cpu" else "bfloat16"
        remat: Any = self.remat
        if remat == "custom":
            remat = Remat(save=self.remat_save, offload=self.remat_offload)
        attention: Any = self.attention
        return Execution(
            layout=layout,
            precision=Precision(params=self.params_dtype, compute=compute),
            remat=remat,
            attention=attention,
            layer_stats=self.layer_stats,
            context_order=self.context_order,
            context_form=self.context_form,
            head_bytes=self.head_bytes,
            exchange_bytes=self.exchange_bytes,
            batch_split=self.batch_split,
            pipeline=self._pipeline(),
            low_precision=self._low_precision(),
        )

    def _pipeline(self) -> Pipeline | None:
        return None if self.pipeline.microbatches is None else Pipeline(**dataclasses.asdict(self.pipeline))

    def _low_precision(self) -> LowPrecision | None:
        return None if self.low_precision.mode is None else LowPrecision(**vars(self.low_precision))
