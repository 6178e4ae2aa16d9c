"""All training methods, and `train` with all of them.

This table is in `rl`, and not in `training`, because packages import only from packages before them (see
`tests/test_imports.py`): `training` cannot import the methods that sample completions.
"""

from eqx_decoders.training.methods import distill
from eqx_decoders.training.methods.method import MethodStart, OpenedMethod
from eqx_decoders.training.methods.preference import open_preferences, open_rewards
from eqx_decoders.training.methods.sft import open_texts
from eqx_decoders.training.run import loop
from eqx_decoders.training.run.start import Methods
from eqx_decoders.training.settings.run import TrainConfig


def open_rl(start: MethodStart) -> OpenedMethod:
    """Open the prompts of a run with the method `rl`."""
    from eqx_decoders.rl import run  # imports the serving engine, which other methods do not need

    return run.open_rl(start)


def open_distillation(start: MethodStart) -> OpenedMethod:
    """Open the data and the teacher of a run with the method `distill`."""
    if not start.config.distill.on_policy:
        return distill.open_distillation(start)
    from eqx_decoders.rl import run

    return run.open_on_policy(start)


METHODS: Methods = {
    "sft": open_texts,
    "dpo": open_preferences,
    "kto": open_preferences,
    "reward": open_rewards,
    "rl": open_rl,
    "distill": open_distillation,
}


def train(config: TrainConfig, methods: Methods = METHODS) -> int:
    """Start or resume a run and train until its last step or a signal; return the exit code of the program.

    In a run of several processes, all of them must call this. Raises the errors of `eqx_decoders.errors`. If a signal
    arrives before the first step, it raises `Stopped`, which is a KeyboardInterrupt.

    **Arguments:**

    - `methods`: for each training method, the function that opens its data and makes its loss.
    """
    return loop.train(config, methods)
