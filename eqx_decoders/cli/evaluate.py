"""Evaluate a model on custom tasks, on lm-eval tasks and by its perplexity on texts, or compare two models.

    python scripts/evaluate.py --model runs/rl --tasks tasks.py:gsm8k --samples 16
    python scripts/evaluate.py --model Qwen/Qwen3-0.6B --tasks lm-eval:arc_easy,hellaswag --text wiki=wiki.txt
    python scripts/evaluate.py --model runs/rl --against runs/sft --tasks tasks.py:gsm8k

A task is a Python file with examples and a grade function (see eqx_decoders/evaluation). Completions are written to the
output directory, one JSON object per line.
"""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from eqx_decoders.cli import program, require
from eqx_decoders.cli.devices import Devices
from eqx_decoders.cli.model_source import AdaptedModelSource, ModelSource
from eqx_decoders.cli.setting_flags import flag_names, parse_flags
from eqx_decoders.core.malloc import keep_memory
from eqx_decoders.errors import AtLeast, NonNegativeInt, PositiveInt, check
from eqx_decoders.evaluation.engine_requests import Progress
from eqx_decoders.evaluation.lm_eval_model import make_lm
from eqx_decoders.evaluation.lm_eval_tasks import PREFIX, LMEvalSettings, find_tasks, run_tasks, task_names
from eqx_decoders.evaluation.score_tables import Scores, compare, describe
from eqx_decoders.evaluation.task import LoadedTask, load_task
from eqx_decoders.evaluation.task_run import AnswerSettings, default_prefill_chunk, evaluate_task, make_engine
from eqx_decoders.evaluation.task_scores import TaskScores
from eqx_decoders.evaluation.text_sets import TextSet, evaluate_texts, load_text_set
from eqx_decoders.inference.text_model import TextModel
from eqx_decoders.inference.unstack import unstack_in_place
from eqx_decoders.io.atomic_files import expand_paths, write_json
from eqx_decoders.io.huggingface.hub import resolve
from eqx_decoders.io.program_cache import keep_programs
from eqx_decoders.io.status import StatusLine
from eqx_decoders.serving.engine.config import EngineLimits


MAX_LENGTH = 2048

AtLeastTwo = Annotated[int, AtLeast(2)]

BASIC = ("model", "adapter", "tasks", "text", "against", "samples", "temperature", "limit", "output")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig(AdaptedModelSource, AnswerSettings, EngineLimits):
    """Measure a model on tasks and texts."""

    checked_name = ""

    model: str | None = None
    """Model: a run directory, a directory in Hugging Face's format, "org/name" on the hub, or a GGUF file."""
    against: str | None = None
    """Second model, without the adapter, compared on the same prompts with the same seeds."""
    tasks: tuple[str, ...] = ()
    """Tasks: file.py:name, or lm-eval:name,name (extra lm-eval)."""
    text: tuple[str, ...] = ()
    """Texts for perplexity: name=path, of a text file or a file of records."""
    text_field: str = "text"
    """Field of a record with its text."""
    text_context: PositiveInt = 1
    """Minimum number of context tokens before the first scored token of a window of a long text. 1: as in lm-eval."""
    limit: PositiveInt | None = None
    """Maximum number of examples per task. The first examples are used. None: all."""
    chat: bool = True
    """Format prompts as messages if the model has a chat template."""
    lm_eval_chat: bool = False
    """Apply the chat template to lm-eval's tasks."""
    fewshot: NonNegativeInt | None = None
    """Number of few-shot examples of lm-eval tasks. None: the task's value."""
    include_path: str | None = None
    """Directory with YAML files of lm-eval tasks."""
    prefill_chunk: PositiveInt | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of prompt tokens per prefill step, which continuations of one context share. None: 32 on CPUs, otherwise
    128."""
    max_length: AtLeastTwo | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Maximum length of a prompt and its completion, and of a window of a text. None: 2048, or the model's training
    length if that is less."""
    output: str = "runs/evaluation"
    """Directory for results.json and the completions, <task>.jsonl."""

    def __post_init__(self):
        super().__post_init__()
        expand_paths(self, "output", "include_path")
        check(not self.distributed, "distributed=True is not for evaluations: one process has all its devices.")
        check(bool(self.tasks or self.text), "tasks=() and text=() leave nothing to evaluate: give one of them.")
        has_lm_eval_tasks = any(spec.startswith(PREFIX) for spec in self.tasks)
        for name, default in (("lm_eval_chat", False), ("fewshot", None), ("include_path", None)):
            value = getattr(self, name)
            check(
                value == default or has_lm_eval_tasks,
                f"{name}={value!r} applies only to lm-eval tasks, tasks={PREFIX}NAME: leave it out.",
            )
        check(
            self.text_context == 1 or bool(self.text),
            f"text_context={self.text_context} applies only to text: leave it out, or set text.",
        )
        check(
            self.step is None or self.against is None,
            f"step={self.step} and against={self.against!r} exclude each other: leave one out.",
        )

    def sources(self) -> list[ModelSource]:
        """Return the sources of the model and, with `against`, of the second model."""
        first = _source(self, self.model)
        if self.against is None:
            return [first]
        return [first, dataclasses.replace(_source(self, self.against), adapter=None)]

    @property
    def names(self) -> list[str]:
        """Names of the models."""
        first = self.model or self.run_dir or "runs/tiny"
        first += "" if self.adapter is None else f" with {self.adapter}"
        return [first] if self.against is None else [first, self.against]

    @property
    def table_ks(self) -> tuple[int, ...]:
        """Values k of pass@k in tables. For a single sample, pass@1 is the score and is left out."""
        return self.reported_ks if self.samples > 1 or self.pass_at else ()

    def lm_eval_settings(self) -> LMEvalSettings:
        """Return the settings of lm-eval tasks."""
        return LMEvalSettings(
            num_fewshot=self.fewshot,
            chat=self.lm_eval_chat,
            include_path=self.include_path,
            limit=self.limit,
            seed=self.seed,
        )


def _source(config: EvaluateConfig, model: str | None) -> AdaptedModelSource:
    """Return the source of a model. `--model` of this program can also be a run directory."""
    fields: dict[str, Any] = {
        field.name: getattr(config, field.name) for field in dataclasses.fields(AdaptedModelSource)
    }
    is_run = model is not None and (Path(model).expanduser() / "settings.json").is_file()
    if is_run:
        fields |= dict(run_dir=str(Path(model or "").expanduser()), model=None)
    elif model is not None:
        fields |= dict(model=model, run_dir=config.run_dir if model == config.model else None)
    return AdaptedModelSource(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """Loaded tasks and texts. They are loaded before the models, so that errors in them are found first."""

    tasks: Sequence[LoadedTask]
    texts: Sequence[TextSet]
    lm_eval_tasks: Sequence[str]
    manager: Any


@program(lambda: flag_names(EvaluateConfig) | {"text": "--text"})
def main(args: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the program with command line arguments; return the exit code."""
    require("tyro")
    config = parse(args, prog)
    keep_memory()
    keep_programs()
    plan, sources, results = prepare(config), config.sources(), []
    for source in sources:
        if source.model is not None:
            resolve(source.model)  # report a missing model before the first model is evaluated
    for number, source in enumerate(sources):
        results.append(evaluate_model(config, source, plan))
        report(config, results[-1], number)
    finish(config, results)
    return 0


def parse(args: Sequence[str] | None = None, prog: str | None = None) -> EvaluateConfig:
    """Parse the arguments of a command line; exit with 2 for unknown ones."""
    titles = {EvaluateConfig: "what", AnswerSettings: "answers", EngineLimits: "engine"}
    titles |= {AdaptedModelSource: "model", ModelSource: "model", Devices: "devices"}
    default = EvaluateConfig.__new__(EvaluateConfig)
    for field in dataclasses.fields(EvaluateConfig):  # the constructor would reject defaults without tasks and texts
        object.__setattr__(default, field.name, field.default)
    return parse_flags(default, titles=titles, first=BASIC, args=args, prog=prog, description=__doc__)


def prepare(config: EvaluateConfig) -> EvaluationPlan:
    """Load tasks and texts."""
    specs = [spec for spec in config.tasks if not spec.startswith(PREFIX)]
    lm_eval_tasks = task_names(config.tasks)
    tasks = [load_task(spec, config.limit) for spec in specs]
    if not config.chat:
        tasks = [dataclasses.replace(loaded, task=dataclasses.replace(loaded.task, chat=False)) for loaded in tasks]
    texts = [load_text_set(spec, config.text_field) for spec in config.text]
    names = [*(task.name for task in tasks), *(text_set.name for text_set in texts)]
    check(
        len(set(names)) == len(names),
        f"tasks and text have the names {', '.join(names)}: each name must be used once, because results are stored by "
        f"name.",
    )
    manager = find_tasks(lm_eval_tasks, config.lm_eval_settings()) if lm_eval_tasks else None
    return EvaluationPlan(tasks=tasks, texts=texts, lm_eval_tasks=lm_eval_tasks, manager=manager)


def evaluate_model(config: EvaluateConfig, source: ModelSource, plan: EvaluationPlan) -> list[Scores]:
    """Load a model, and evaluate it on all tasks and texts."""
    text = source.load()
    text = dataclasses.replace(text, model=unstack_in_place(text.model))
    text = text if config.special_tokens_in_content else text.with_special_tokens_as_text()
    engine = make_engine(text, limits(config, text))
    with StatusLine("compiling"):
        engine.warm_up()
    results: list[Scores] = []
    for task in plan.tasks:
        with counting(f"task {task.name}", len(task.examples) * config.samples) as progress:
            results.append(evaluate_task(text, engine, task, config, progress))
    for texts in plan.texts:
        with counting(f"text {texts.name}") as progress:
            results.append(evaluate_texts(text.tokenizer, engine, texts, config.text_context, progress))
    if plan.lm_eval_tasks:
        with counting("lm-eval") as progress:
            name = source.model or source.run_dir or ""
            lm = make_lm(text, engine, name=name, seed=config.seed, progress=progress)
            results += run_tasks(lm, plan.lm_eval_tasks, config.lm_eval_settings(), plan.manager)
    engine.close()
    return results


def limits(config: EvaluateConfig, text: TextModel) -> EngineLimits:
    """Return the limits of the engine, with defaults that depend on the model."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(EngineLimits)}
    if config.prefill_chunk is None:
        fields["prefill_chunk"] = default_prefill_chunk(text)
    if config.max_length is None:
        fields["max_length"] = min(MAX_LENGTH, text.model.trained_positions or MAX_LENGTH)
    return EngineLimits(**fields)


@contextlib.contextmanager
def counting(what: str, total: int | None = None) -> Iterator[Progress]:
    """Show the number of finished requests in the status line."""
    done = 0
    with StatusLine(what) as status:

        def add(count: int) -> None:
            nonlocal done
            done += count
            status.what = f"{what}: {done:,}" + ("" if total is None else f" of {total:,}")

        yield add


def report(config: EvaluateConfig, scores: Sequence[Scores], number: int) -> None:
    """Print the tables of a model, and write its completions. `number`: 0 for the first model, 1 for the second one."""
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    completions = "1 completion" if config.samples == 1 else f"{config.samples} completions"
    sampling = "greedy"
    if config.sampling_temperature > 0:
        sampling = f"temperature {config.sampling_temperature:g}, seed {config.seed}"
    print(f"{config.names[number]}: {completions} per prompt, {sampling}\n")
    print("\n".join(describe(scores, config.table_ks)), flush=True)
    for task in scores:
        if isinstance(task, TaskScores):
            task.write(folder / (f"{task.name}.jsonl" if number == 0 else f"{task.name}.against.jsonl"))


def finish(config: EvaluateConfig, results: Sequence[Sequence[Scores]]) -> None:
    """Print the comparison of two models, and write all metrics to results.json."""
    if len(results) == 2:
        print("\n".join(compare(results[0], results[1], (config.names[0], config.names[1]))) + "\n")
    figures = {
        name: {
            scores.name: scores.figures(config.table_ks) if isinstance(scores, TaskScores) else scores.figures()
            for scores in model_results
        }
        for name, model_results in zip(config.names, results, strict=True)
    }
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(AnswerSettings)}
    write_json(Path(config.output) / "results.json", _without_nan({"settings": settings, "models": figures}))
    print(f"results and completions are in {config.output}", file=sys.stderr)


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: _without_nan(child) for key, child in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
