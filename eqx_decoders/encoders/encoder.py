"""An encoder of images or audio: a stem, the layers and the scan of decoders, and a projector."""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from eqx_decoders.blocks.block import BlockConfig
from eqx_decoders.blocks.stack import Segment, segments
from eqx_decoders.context import Context, Execution
from eqx_decoders.encoders.audio_stem import AudioStem, AudioStemConfig
from eqx_decoders.encoders.frame_stem import FrameStem, FrameStemConfig
from eqx_decoders.encoders.packed_rows import AudioRows, PatchRows
from eqx_decoders.encoders.projector import Projection, ProjectionConfig, Projector, ProjectorConfig
from eqx_decoders.encoders.stem import PatchStem, PatchStemConfig
from eqx_decoders.errors import check, check_integer
from eqx_decoders.layers.norm import Norm, NormConfig
from eqx_decoders.numerics.matmul import with_bounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """`projector(post_norm(block_n(... block_1(pre_norm(stem(rows))))))`: an encoder is data, as a decoder is.

    **Arguments:**

    - `embed_dim`: features of its residual stream.
    - `stem`: what makes them, of patches, of chunks of audio or of whole audio.
    - `blocks`: one configuration per layer, whose attention has `mask=Bidirectional(...)`, or is a local one.
    - `pre_norm`, `post_norm`: before the first layer and behind the last one.
    - `projector`: makes rows that stand where placeholder tokens are.
    - `deepstack`: the layers, counted from 0, whose output also reaches the decoder: the features of the first of them
        are added behind its first layer, and so on (Meng et al. 2024).
    - `deepstack_projector`: of these, each of which has its own.
    - `into`: one more matrix, from the encoder's features to those of the decoder, where these are not the same
        (Llama 4); None for none.
    - `clipped`: whether every matrix of the layers clips what it reads and what it makes, by bounds that come with a
        checkpoint; new ones clip nothing (Gemma 4).
    """

    embed_dim: int
    stem: PatchStemConfig | AudioStemConfig | FrameStemConfig
    blocks: tuple[BlockConfig, ...]
    projector: ProjectorConfig
    pre_norm: NormConfig | None = None
    post_norm: NormConfig | None = None
    deepstack: tuple[int, ...] = ()
    deepstack_projector: ProjectorConfig | None = None
    into: ProjectionConfig | None = None
    clipped: bool = False

    def __post_init__(self):
        object.__setattr__(self, "blocks", tuple(self.blocks))
        object.__setattr__(self, "deepstack", tuple(self.deepstack))
        check_integer("EncoderConfig.embed_dim", self.embed_dim)
        check(len(self.blocks) > 0, "EncoderConfig.blocks=() must hold at least one BlockConfig.")
        for layer in self.deepstack:
            check_integer("EncoderConfig.deepstack", layer, minimum=0)
        good = sorted({*self.deepstack}) == [*self.deepstack] and max(self.deepstack, default=0) < len(self.blocks)
        rule = f"must name layers from 0 to {len(self.blocks) - 1}, each once, ascending"
        check(good, f"EncoderConfig.deepstack={self.deepstack} {rule}.")
        both = (self.deepstack_projector is not None) == bool(self.deepstack)
        check(both, "EncoderConfig.deepstack and deepstack_projector: give both, or neither.")
        groups = {self.stem.group, self.projector.group}
        groups |= set() if self.deepstack_projector is None else {self.deepstack_projector.group}
        rule = f"must be {self.stem.group}, as many patches as the stem puts together"
        check(len(groups) == 1, f"EncoderConfig.projector.group={self.projector.group} {rule}.")

    @property
    def out_dim(self) -> int:
        """Features of a row that stands where a placeholder is."""
        return self.projector.out_dim if self.into is None else self.into.dim

    @property
    def parts(self) -> tuple[tuple[tuple[BlockConfig, ...], int], ...]:
        """Its layers as `(unit, repeats)`, each a scan: one ends where features leave for the decoder."""
        ends = [*(layer + 1 for layer in self.deepstack), len(self.blocks)]
        begins = [0, *ends[:-1]]
        return tuple(
            part for begin, end in zip(begins, ends, strict=True) if begin < end
            for part in segments(self.blocks[begin:end])
        )  # fmt: skip

    def build(self, *, key: PRNGKeyArray) -> "Encoder":
        stem_key, block_key, projector_key, deepstack_key = jax.random.split(key, 4)
        keys, stack, begin = jax.random.split(block_key, len(self.blocks)), [], 0
        for unit, repeats in self.parts:
            count = len(unit) * repeats
            stack.append(Segment.build(unit, self.embed_dim, keys=keys[begin : begin + count]))
            begin += count
        further, into = self.deepstack_projector, self.into
        into_key = jax.random.fold_in(projector_key, 0)
        return Encoder(
            stem=self.stem.build(self.embed_dim, key=stem_key),
            segments=with_bounds(tuple(stack)) if self.clipped else tuple(stack),
            pre_norm=None if self.pre_norm is None else self.pre_norm.build(self.embed_dim),
            post_norm=None if self.post_norm is None else self.post_norm.build(self.embed_dim),
            projector=self.projector.build(self.embed_dim, key=projector_key),
            deepstack=() if further is None else tuple(
                further.build(self.embed_dim, key=jax.random.fold_in(deepstack_key, index))
                for index in range(len(self.deepstack))
            ),
            into=None if into is None else into.build(self.projector.out_dim, key=into_key),
            config=self,
        )  # fmt: skip


class EncodedRows(NamedTuple):
    """What an encoder makes of rows of patches or chunks.

    **Arguments:**

    - `features`: its own.
    - `rows`: what stands where placeholders are: the same, unless one more matrix is between them.
    - `deepstack`: what is added behind the first layers of the decoder.
    """

    features: Float[Array, "batch rows features"]
    rows: Float[Array, "batch rows embed"]
    deepstack: tuple[Float[Array, "batch rows embed"], ...]


class Encoder(eqx.Module):
    """`projector(post_norm(block_n(... block_1(pre_norm(stem(rows))))))`."""

    stem: PatchStem | AudioStem | FrameStem
    segments: tuple[Segment, ...]
    pre_norm: Norm | None
    post_norm: Norm | None
    projector: Projector
    deepstack: tuple[Projector, ...]
    into: Projection | None
    config: EncoderConfig = eqx.field(static=True)

    def __call__(self, rows: PatchRows | AudioRows, execution: Execution) -> EncodedRows:
        """Rows of features for the first layer, and those that are added behind later ones."""
        ctx = self._context(rows, execution)
        stem: Any = self.stem
        x = stem(rows, ctx)
        x = x if self.pre_norm is None else self.pre_norm(x)
        further, layer = [], 0
        for segment in self.segments:
            x = segment(x, ctx).x
            layer += len(segment.unit) * segment.repeats
            if layer - 1 in self.config.deepstack:
                further.append(self.deepstack[len(further)](x, ctx))
        x = x if self.post_norm is None else self.post_norm(x)
        features = self.projector(x, ctx)
        return EncodedRows(features, features if self.into is None else self.into(features, ctx), tuple(further))

    def _context(self, rows: PatchRows | AudioRows, execution: Execution) -> Context:
        # layers of pipelines and halves of batches are the decoder's; order is that of the image
        execution = dataclasses.replace(execution, pipeline=None, batch_split=1, context_order="plain")
        coordinates = rows.coordinates if isinstance(rows, PatchRows) else None
        segment_ids = None if rows.segment_ids is None else jnp.asarray(rows.segment_ids)
        return Context(
            positions=jnp.asarray(rows.positions),
            segment_ids=segment_ids,
            execution=execution,
            rotary_positions=None if coordinates is None else jnp.asarray(coordinates),
        )
