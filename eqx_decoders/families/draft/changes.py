"""Fields of a configuration that must differ where a checkpoint has tensors that its family would not have."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.residual.residual import Parallel
from eqx_decoders.families.common import map_blocks
from eqx_decoders.families.draft.tensor_groups import Shape
from eqx_decoders.layers.attention.attention import QKNorm
from eqx_decoders.layers.norm import LayerNormConfig, LayerScaleConfig, NormConfig
from eqx_decoders.model.decoder_config import DecoderConfig


Owner = Literal["mixer", "mlp", "block", "decoder"]
NORMS = ("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm")


@dataclasses.dataclass(frozen=True)
class Change:
    """Field that gets another value.

    **Arguments:**

    - `owner`: what has the field: the mixer, the MLP, the block or the decoder.
    - `field`: its name.
    - `code`: its value as Python writes it, where `block`, or `config`, is what is changed.
    - `value`: returns the value, of a block or of the decoder's configuration.
    - `assumed`: what the tensors leave open; empty for nothing.
    """

    owner: Owner
    field: str
    code: str
    value: Callable[[Any], Any]
    assumed: str = ""

    @property
    def key(self) -> tuple[Owner, str]:
        """What it changes."""
        return self.owner, self.field


# A block whose one norm both of its layers read.
PARALLEL = Change(
    "block", "residual", "Parallel()", lambda _: Parallel(), "attention and MLP, which share a norm, are parallel"
)


def change_for(path: str, present: bool, shape: Shape, config: DecoderConfig) -> Change | None:
    """Return the change by which weights at `path` are there, or not; None where no single field says it.

    `path` is one in a block, or in the decoder.
    """
    for pattern, make in _RULES:
        if re.fullmatch(pattern, path):
            return make(path, present, shape, config)
    return None


def changed(config: DecoderConfig, changes: Sequence[Change]) -> DecoderConfig:
    """Return the configuration with the changes."""

    def change(block: BlockConfig) -> BlockConfig:
        fields: dict[str, Any] = {each.field: each.value(block) for each in changes if each.owner == "block"}
        for owner in ("mixer", "mlp"):
            inner = {each.field: each.value(block) for each in changes if each.owner == owner}
            if inner:
                fields[owner] = dataclasses.replace(getattr(block, owner), **inner)
        return dataclasses.replace(block, **fields)

    outer = {each.field: each.value(config) for each in changes if each.owner == "decoder"}
    return map_blocks(dataclasses.replace(config, **outer), change)


def applies(change: Change, config: DecoderConfig) -> bool:
    """Return True if all that it would change have the field, and are of one kind."""
    owners: Iterable[Any] = [config]
    if change.owner != "decoder":
        owners = config.blocks if change.owner == "block" else [getattr(block, change.owner) for block in config.blocks]
    kinds = {type(owner) for owner in owners}
    (kind, *more) = kinds
    return not more and dataclasses.is_dataclass(kind) and change.field in {f.name for f in dataclasses.fields(kind)}


def _flag(owner: Owner, field: str) -> Callable[..., Change]:
    def make(path: str, present: bool, shape: Shape, config: DecoderConfig) -> Change:
        return Change(owner, field, str(present), lambda _: present)

    return make


def _tied(path: str, present: bool, shape: Shape, config: DecoderConfig) -> Change:
    return Change("decoder", "tied", str(not present), lambda _: not present)


def _first_norm(block: BlockConfig) -> NormConfig:
    first = block.pre_mixer_norm or block.post_mixer_norm
    return LayerNormConfig() if first is None or isinstance(first, LayerScaleConfig) else first


_FIRST_NORM = "(block.pre_mixer_norm or block.post_mixer_norm)"


def _qk_norm(path: str, present: bool, shape: Shape, config: DecoderConfig) -> Change:
    if not present:
        return Change("mixer", "qk_norm", "None", lambda _: None)
    widths = {getattr(block.mixer, "head_dim", None) for block in config.blocks}
    over: Any = "each_head" if shape is not None and len(shape) == 2 else "heads"
    over = "head" if shape is None or shape[0] in widths else over
    kind = "" if over == "head" else f', over="{over}"'
    assumed = "queries and keys are normalized before they are rotated, with the eps of the other norms"
    if path.endswith(".bias"):
        code = f"QKNorm(norm=LayerNormConfig(eps={_FIRST_NORM}.eps){kind})"
        return Change("mixer", "qk_norm", code, lambda block: QKNorm(norm=_layer_norm(block), over=over), assumed)
    code = f"QKNorm(norm={_FIRST_NORM[1:-1]}{kind})"
    return Change("mixer", "qk_norm", code, lambda block: QKNorm(norm=_first_norm(block), over=over), assumed)


def _layer_norm(block: BlockConfig) -> LayerNormConfig:
    return LayerNormConfig(eps=_first_norm(block).eps)


def _norm(path: str, present: bool, shape: Shape, config: DecoderConfig) -> Change:
    """Return the change of a norm: it is there, or not, or it has a bias, or not."""
    field, _, part = path.partition(".")
    owner: Owner = "block" if field in NORMS else "decoder"
    other = _FIRST_NORM if owner == "block" else "config.final_norm"

    def model(holder: Any) -> NormConfig:
        first = _first_norm(holder) if isinstance(holder, BlockConfig) else holder.final_norm
        return getattr(holder, field) or first or LayerNormConfig()

    if part == "bias":
        holders = [config] if owner == "decoder" else config.blocks
        there = all(getattr(holder, field) is not None for holder in holders)
        eps = f"{owner if owner == 'block' else 'config'}.{field}.eps" if there else f"{other}.eps"
        code = f"LayerNormConfig(eps={eps}{'' if present else ', bias=False'})"
        assumed = "" if present else f"{field} is LayerNorm without a bias, not RMSNorm"
        return Change(owner, field, code, lambda holder: LayerNormConfig(eps=model(holder).eps, bias=present), assumed)
    if present:
        return Change(owner, field, other.strip("()"), model, f"{field} is one like the others")
    return Change(owner, field, "None", lambda _: None, f"no {field}, rather than one without a scale")


_RULES: tuple[tuple[str, Callable[..., Change | None]], ...] = (
    (r"mixer\.(query|key|value|qkv)_bias", _flag("mixer", "qkv_bias")),
    (r"mixer\.out_bias", _flag("mixer", "out_bias")),
    (r"mixer\.(query|key)_norm(\.\w+|_scale)", _qk_norm),
    (r"mixer\.sink", _flag("mixer", "sinks")),
    (r"mlp\.(gate|up|down)_bias", _flag("mlp", "bias")),
    (r"mlp\.gate", _flag("mlp", "gated")),
    (r"(pre|post)_(mixer|mlp)_norm\.\w+", _norm),
    (r"(final_norm|embedding_norm)\.\w+", _norm),
    (r"head_bias", _flag("decoder", "head_bias")),
    (r"head\.kernel", _tied),
)
