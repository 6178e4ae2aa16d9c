"""Settings of layers of multi-token prediction, and ignored tensors of such layers."""

from collections.abc import Callable

from eqx_decoders.families.setting_rows import ABSENT, Check, Integer, Setting
from eqx_decoders.model.decoder_config import DecoderConfig


def _num_depths(config: DecoderConfig) -> int:
    return config.mtp.num_depths if config.mtp else 0


# Row of the value `depths`, the number of layers of multi-token prediction.
DEPTHS = Integer("num_nextn_predict_layers", _num_depths, 0, least=0, name="depths")


def depth_settings(key: str, *, always: bool = True) -> tuple[Setting, ...]:
    """Return the rows of the value `depths`, for families with at most one layer of multi-token prediction.

    `always`: whether the key is written if there is no such layer.
    """
    return (
        Integer(key, lambda config: _num_depths(config) or (0 if always else ABSENT), 0, least=0, name="depths"),
        Check(
            lambda values: values["depths"] <= 1,
            f"{key}={{depths}} must be 0 or 1: more layers of multi-token prediction are not supported.",
        ),
    )


def unread_depths(tensors: str, ignored: str = r".*rotary_emb\.inv_freq") -> Callable[[DecoderConfig], str]:
    """Return `Family.ignored_tensors`: `ignored`, and `tensors` for models without multi-token prediction.

    Both arguments are regular expressions. `tensors` matches the tensors of layers of multi-token prediction, which a
    checkpoint may have even if its `config.json` has no such layers.
    """
    return lambda config: ignored if config.mtp is not None else f"{ignored}|{tensors}"
