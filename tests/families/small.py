"""Small decoders of families with special layers."""

from eqx_decoders.families.common import DecoderSizes
from eqx_decoders.families.deepseek.blocks import deepseek, latent_attention, v3_router
from eqx_decoders.families.gemma.gemma3n import gemma3n, gemma3n_per_layer_embedding, gemma3n_residual
from eqx_decoders.families.gemma.gemma4 import gemma4
from eqx_decoders.families.longcat_flash import longcat_flash
from eqx_decoders.families.maxtext import deepseek_custom
from eqx_decoders.layers.embedding.engram import TokenClasses
from eqx_decoders.layers.embedding.per_layer_embedding import PerLayerEmbeddingConfig
from eqx_decoders.layers.mask import Causal, SlidingWindow
from eqx_decoders.layers.rope import Rope
from tests.models import EMBED, VOCAB


_DEEPSEEK = DecoderSizes(vocab_size=32, embed_dim=16, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=8, mlp_dim=24)
_GEMMA = DecoderSizes(
    vocab_size=32, embed_dim=16, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=4, mlp_dim=24, tied=True,
    activation="gelu_tanh",
)  # fmt: skip
_LONGCAT = DecoderSizes(
    vocab_size=VOCAB, embed_dim=EMBED, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8, mlp_dim=24
)
_MASKS = (SlidingWindow(4), Causal()) * 2
_HEADS = ((4, 4), (2, 8)) * 2

DEEPSEEK_CUSTOM = deepseek_custom(
    deepseek(
        _DEEPSEEK, latent_attention(_DEEPSEEK, rope=Rope(), q_rank=8, kv_rank=8, nope_dim=4, value_dim=8),
        router=v3_router(groups=1, groups_per_token=1, scaling_factor=2.5), num_experts=4,
        num_experts_per_token=2, num_shared=1, expert_dim=8, dense_layers=range(1),
    ),
    streams=2, engram_layers=(1,), num_heads=2, head_dim=4, vocab_bases=(11, 17), taps=2,
    token_classes=TokenClasses.of([index // 2 for index in range(32)]),
)  # fmt: skip
GEMMA3N = gemma3n(
    _GEMMA, masks=_MASKS, num_kv_shared_layers=2, sparsity=(0.5, 0.0, 0.5, 0.0),
    residual=gemma3n_residual(_GEMMA, streams=3, rank=4),
    per_layer=gemma3n_per_layer_embedding(_GEMMA, features=4, vocab_size=32),
)  # fmt: skip
GEMMA4 = gemma4(
    _GEMMA, masks=_MASKS, heads=_HEADS, num_kv_shared_layers=2, double_wide=True,
    per_layer=PerLayerEmbeddingConfig(features=4, vocab_size=32),
)  # fmt: skip
GEMMA4_EXPERTS = gemma4(
    _GEMMA, masks=_MASKS[:2], heads=_HEADS[:2], shared_kv=True,
    experts=dict(num_experts=4, num_experts_per_token=2, mlp_dim=8),
)  # fmt: skip
LONGCAT = longcat_flash(
    _LONGCAT, q_rank=8, kv_rank=8, nope_dim=4, value_dim=4, expert_dim=8, num_experts=4, num_zero_experts=4,
    num_experts_per_token=3,
)  # fmt: skip
