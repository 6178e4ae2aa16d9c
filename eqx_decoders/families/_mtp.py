"""Settings of layers of multi-token prediction, and their tensors in files whose settings do not count them."""

from collections.abc import Callable
from typing import Any

from eqx_decoders.families.settings_table import ABSENT, Check, Integer, Setting
from eqx_decoders.model.decoder_config import DecoderConfig


DEPTHS = Integer(
    "num_nextn_predict_layers", lambda config: config.mtp.num_depths if config.mtp else 0, 0, least=0, name="depths"
)


def depth_settings(key: str, *, always: bool = True) -> tuple[Setting, ...]:
    """Return the rows of the number of layers where at most one is known: `always` writes 0."""

    def depths(config: DecoderConfig) -> Any:
        return config.mtp.num_depths if config.mtp else 0 if always else ABSENT

    sentence = f"{key}={{depths}} is not known here: one layer is."
    return (
        Integer(key, depths, 0, least=0, name="depths"),
        Check(lambda values: values["depths"] <= 1, sentence),
    )


def unread_depths(tensors: str, ignored: str = r".*rotary_emb\.inv_freq") -> Callable[[DecoderConfig], str]:
    """Return `Family.ignored_tensors`: `ignored`, and `tensors` where no setting counts the layers."""
    return lambda config: ignored if config.mtp is not None else f"{ignored}|{tensors}"
