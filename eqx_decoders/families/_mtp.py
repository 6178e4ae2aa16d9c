"""Settings of layers of multi-token prediction, and their tensors in files whose settings do not count them."""

from collections.abc import Callable

from eqx_decoders.families.settings_table import ABSENT, Check, Integer, Setting
from eqx_decoders.model.decoder_config import DecoderConfig


def _num_depths(config: DecoderConfig) -> int:
    return config.mtp.num_depths if config.mtp else 0


DEPTHS = Integer("num_nextn_predict_layers", _num_depths, 0, least=0, name="depths")


def depth_settings(key: str, *, always: bool = True) -> tuple[Setting, ...]:
    """Return the rows of the number of layers where at most one is known: `always` writes 0."""
    sentence = f"{key}={{depths}} is not known here: one layer is."
    return (
        Integer(key, lambda config: _num_depths(config) or (0 if always else ABSENT), 0, least=0, name="depths"),
        Check(lambda values: values["depths"] <= 1, sentence),
    )


def unread_depths(tensors: str, ignored: str = r".*rotary_emb\.inv_freq") -> Callable[[DecoderConfig], str]:
    """Return `Family.ignored_tensors`: `ignored`, and `tensors` where no setting counts the layers."""
    return lambda config: ignored if config.mtp is not None else f"{ignored}|{tensors}"
