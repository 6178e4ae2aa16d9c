"""Scores of a reward model as rewards of drawn answers."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Array, Float32

from eqx_decoders.context import Execution
from eqx_decoders.data.batch import Batch
from eqx_decoders.errors import DataError, check
from eqx_decoders.io.status import StatusLine
from eqx_decoders.io.text.tokenizer import Tokenizer
from eqx_decoders.model.decoder import Decoder
from eqx_decoders.model.weights_fingerprint import weights_fingerprint
from eqx_decoders.rl.answer_batch import AnswerPacker
from eqx_decoders.rl.drawn_answers import JudgedAnswer
from eqx_decoders.rl.sampler_engine import Groups
from eqx_decoders.serving.rollouts import Rollout
from eqx_decoders.training.methods.rl_config import RLConfig
from eqx_decoders.training.methods.teacher import check_same_tokens
from eqx_decoders.training.objectives.reward_scores import reward_scores


COLUMN = "reward_model"  # among the rewards of an answer


class RewardModel:
    """Reward model of a run, on its mesh: the score of an answer is one of the answer's rewards.

    It reads the tokens of the prompt and those that were drawn, never text that is tokenized again; of an episode the
    last part, up to the model's last token. Answers are packed as in the batches of steps, so that a run compiles a
    program for each number of rows alone.
    """

    def __init__(self, rl: RLConfig, tokenizer: Tokenizer, execution: Execution, packer: AnswerPacker):
        self._model = load_reward_model(str(rl.reward_model), tokenizer, execution)
        length, most = packer.seq_len, getattr(self._model.config.positions, "max_positions", None)
        rule = f"rl.reward_model={rl.reward_model!r} has {most} learned positions, fewer than seq_len={length}"
        check(most is None or length <= most, f"{rule}: lower it.")
        self._packed, self._at_once = packer, rl.prompts * rl.samples  # that fit into a batch
        self._weight, self._alone = rl.weights().get(COLUMN, 1.0), rl.reward is None and rl.environment is None
        self.fingerprint = f"{int(weights_fingerprint(self._model)):08x} {self._model.config!r}"

    def scored(self, groups: Groups) -> Groups:
        """Add the score of each answer to its rewards. An answer that was not judged stays so."""
        answers = [answer for group in groups for answer in group]
        cuts = range(0, len(answers), self._at_once)
        scores = iter([score for cut in cuts for score in self._scores(answers[cut : cut + self._at_once])])
        return [[self._judged(answer, next(scores)) for answer in group] for group in groups]

    def _scores(self, answers: Sequence[JudgedAnswer]) -> list[float]:
        """Compute the scores of as many answers as a batch holds; NaN of answers without tokens."""
        batch, drawn, numbers = self._packed([_as_read(answer) for answer in answers])
        scores = np.asarray(_replicated_scores(self._model, batch))
        by_answer = zip(drawn, numbers, strict=True)
        return [float(scores[rows[0], number - 1]) if len(rows) else math.nan for (rows, _), number in by_answer]

    def _judged(self, answer: JudgedAnswer, score: float) -> JudgedAnswer:
        taken = COLUMN in answer.columns
        check(not taken, f"rl.reward gives a number {COLUMN!r}, the name of the reward model's: rename it.", DataError)
        if math.isnan(answer.reward):
            return answer
        if not math.isfinite(score):
            return answer._replace(reward=math.nan, columns={}, error=f"the score of rl.reward_model is {score}")
        columns = {name: value for name, value in answer.columns.items() if not (self._alone and name == "reward")}
        added, episode = self._weight * score, answer.episode
        if episode is not None:  # it is that of the last turn
            earned = (*episode.turn_rewards[:-1], sum(episode.turn_rewards[-1:]) + added)
            episode = episode._replace(turn_rewards=earned)
        return answer._replace(reward=answer.reward + added, columns={**columns, COLUMN: score}, episode=episode)


def load_reward_model(source: str, tokenizer: Tokenizer, execution: Execution) -> Decoder:
    """Load a model that scores answers, from a directory of Hugging Face's form or a run directory.

    Raises ConfigError for one without a score, or with another vocabulary.
    """
    from eqx_decoders.training.run.load_export import OtherModel  # late: of its imports this needs few

    name, other = f"rl.reward_model={source!r}", OtherModel(source)
    with StatusLine(f"loading the reward model {source}", remains="what was downloaded is kept"):
        remedy = "It would read other tokens: take a reward model with the policy's tokenizer"
        check_same_tokens(tokenizer, other.tokenizer, name, "the policy's", remedy)
        model = other.load(execution)
    rule = f"{name} has DecoderConfig.scores={model.config.scores}, and not one score"
    check(model.config.scores == 1, f"{rule}: take a model that method='reward' has trained.")
    return model


def _as_read(answer: JudgedAnswer) -> JudgedAnswer:
    """Return the last part of an answer, up to the last token that was drawn, as an answer to its context."""
    part = next((part for part in reversed(answer.parts) if part.drawn.any()), answer.parts[-1])
    end = int(np.flatnonzero(part.drawn)[-1]) + 1 if part.drawn.any() else 0
    tokens, log_probs, versions = (x[:end] for x in part.rollout[:3])
    read = Rollout(tokens, log_probs, versions, part.rollout.finish_reason)
    return answer._replace(prompt=answer.prompt._replace(tokens=part.context), rollout=read, episode=None)


@jax.jit
def _replicated_scores(model: Decoder, batch: Batch) -> Float32[Array, "batch answers"]:
    return model.execution.layout.replicate(reward_scores(model, batch))
