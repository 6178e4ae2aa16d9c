"""Layers in NumPy and float64, written from the formula with loops: what the tests compare with."""

import functools
import math

import numpy as np

from eqx_decoders.layers.mask import Bidirectional, Chunked, SlidingWindow
from eqx_decoders.layers.norm import LayerNormConfig


def wide(x) -> np.ndarray | None:
    return None if x is None else np.asarray(x, np.float64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def norm_by_hand(layer, x):
    """RMSNorm or LayerNorm of one vector."""
    config, scale = layer.config, wide(layer.scale)
    bias = wide(getattr(layer, "bias", None))
    x = x - sum(x) / len(x) if isinstance(config, LayerNormConfig) else x
    y = x / math.sqrt(sum(v * v for v in x) / len(x) + config.eps)
    y = y if scale is None else y * (config.offset + scale)
    return y if bias is None else y + bias


def rotate_by_hand(vector, position, frequencies, pairing, magnitude=1.0):
    """Each pair is a complex number that is multiplied by magnitude * exp(i position frequency)."""
    out, pairs = np.array(vector, np.float64), len(frequencies)
    for pair, frequency in enumerate(frequencies):
        a, b = (pair, pair + pairs) if pairing == "half" else (2 * pair, 2 * pair + 1)
        angle = position * frequency
        turned = complex(vector[a], vector[b]) * magnitude * complex(math.cos(angle), math.sin(angle))
        out[a], out[b] = turned.real, turned.imag
    return out


def plain_frequencies(theta, dim):
    return [1.0 / theta ** (2 * pair / dim) for pair in range(dim // 2)]


def llama3_by_hand(rope, dim):
    out = []
    for frequency in plain_frequencies(rope.theta, dim):
        wavelen = 2 * math.pi / frequency
        if wavelen > rope.original_length / rope.low_frequency_factor:
            out.append(frequency / rope.factor)
        elif wavelen < rope.original_length / rope.high_frequency_factor:
            out.append(frequency)
        else:
            smooth = rope.original_length / wavelen - rope.low_frequency_factor
            smooth /= rope.high_frequency_factor - rope.low_frequency_factor
            out.append((1 - smooth) * frequency / rope.factor + smooth * frequency)
    return out


def yarn_by_hand(rope, dim):
    """Section 3.2 of the paper, with Hugging Face's bounds: gamma is 1 for pairs that are kept."""

    def correction(rotations):
        return dim * math.log(rope.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    out = []
    for pair, frequency in enumerate(plain_frequencies(rope.theta, dim)):
        gamma = 1 - min(max((pair - low) / (high - low), 0), 1)
        out.append((1 - gamma) * frequency / rope.factor + gamma * frequency)
    return out


BY_HAND = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "tanh": math.tanh,
    "identity": lambda x: x,
}


def xielu_by_hand(layer, x):
    """xIELU of one number."""
    alpha_p, alpha_n = (math.log1p(math.exp(wide(each))) for each in (layer.alpha_p, layer.alpha_n))
    beta, eps = wide(layer.beta), wide(layer.eps)
    if x > 0:
        return alpha_p * x * x + beta * x
    return (math.expm1(min(x, eps)) - x) * (beta + alpha_n) + beta * x


def gated_by_hand(config, act, gate, up):
    act = np.vectorize(lambda x, plain=act: plain(config.activation_scale * x) / config.activation_scale)
    if gate is None:
        return act(up)
    bound = math.inf if config.limit is None else config.limit
    return act(np.minimum(gate, bound)) * (np.clip(up, -bound, bound) + config.up_offset)


def cut_by_hand(vector, sparsity):
    """What is left of a gate above the quantile of a normal distribution with its mean and deviation."""
    if sparsity == 0:
        return vector
    low, high = -10.0, 10.0
    for _ in range(80):  # where the distribution function is `sparsity`
        middle = (low + high) / 2
        low, high = (middle, high) if (1 + math.erf(middle / 2**0.5)) / 2 < sparsity else (low, middle)
    mean = sum(vector) / len(vector)
    cut = mean + low * math.sqrt(sum((v - mean) ** 2 for v in vector) / len(vector))
    return np.array([max(v - cut, 0.0) for v in vector])


def mlp_by_hand(layer, x):
    xielu = functools.partial(xielu_by_hand, layer.xielu)
    act = BY_HAND[layer.config.activation] if layer.xielu is None else xielu
    gate, up = wide(layer.gate), wide(layer.up)
    if layer.gate_up is not None:
        gate, up = wide(layer.gate_up)[:, 0], wide(layer.gate_up)[:, 1]
    bias = {
        n: 0.0 if getattr(layer, n) is None else wide(getattr(layer, n)) for n in ("gate_bias", "up_bias", "down_bias")
    }
    up = x @ up + bias["up_bias"]
    gate = None if gate is None else layer.config.gate_scale * (x @ gate + bias["gate_bias"])
    if gate is not None:
        gate = np.apply_along_axis(lambda vector: cut_by_hand(vector, layer.config.gate_sparsity), -1, gate)
    hidden = gated_by_hand(layer.config, act, gate, up)
    if layer.inner_norm is not None:
        hidden = np.apply_along_axis(lambda vector: norm_by_hand(layer.inner_norm, vector), -1, hidden)
    return layer.config.out_scale * (hidden @ wide(layer.down) + bias["down_bias"])


def scored_by_hand(logits, score):
    if score == "softmax":
        top = [math.exp(z - max(logits)) for z in logits]
        return [z / sum(top) for z in top]
    return [1 / (1 + math.exp(-z)) if score == "sigmoid" else math.sqrt(math.log1p(math.exp(z))) for z in logits]


def best(values, count, among=None):
    """The places of the largest values, the first of equal ones first."""
    return sorted(range(len(values)) if among is None else among, key=lambda i: (-values[i], i))[:count]


def route_by_hand(router, x, replayed=None):
    """The experts of one token, or those that are given, and their weights; and all its logits and scores."""
    c, count = router.config, router.num_experts_per_token
    if router.input_norm is not None:
        x = norm_by_hand(router.input_norm, x) / math.sqrt(len(x))
    logits = list(x @ wide(router.kernel) + (0.0 if router.bias is None else wide(router.bias)))
    scores = scored_by_hand(logits, c.score)
    choice = list(logits if c.order == "select_first" else scores)
    if router.selection_bias is not None:
        choice = [s + b for s, b in zip(choice, wide(router.selection_bias), strict=True)]
    size = len(logits) // c.num_groups
    members = [range(g * size, (g + 1) * size) for g in range(c.num_groups)]
    worth = [
        sum(sorted((choice[e] for e in group), reverse=True)[: 1 if c.group_score == "max" else 2]) for group in members
    ]
    among = [e for g in best(worth, c.groups_per_token) for e in members[g]]
    chosen = best(choice, count, among) if replayed is None else replayed
    weights = [scores[e] for e in chosen]
    if c.order == "select_first":
        weights = scored_by_hand([logits[e] for e in chosen], c.score)
    if c.sparse_mixer is not None:
        weights = []
        for place, e in enumerate(chosen):
            left = [z for i, z in enumerate(logits) if i not in chosen[:place]]
            near = [z for z in left if (logits[e] - z) / max(abs(z), logits[e]) <= 2 * c.sparse_mixer]
            weights.append(1 / sum(math.exp(z - logits[e]) for z in near))
    if c.renormalize:
        weights = [w / sum(weights) for w in weights]
    weights = [w * c.scaling_factor for w in weights]
    if router.per_expert_scale is not None:
        weights = [w * float(router.per_expert_scale[e]) for w, e in zip(weights, chosen, strict=True)]
    return chosen, weights, logits, scores


def expert_by_hand(layer, e, x):
    c = layer.config
    bias = {
        n: 0.0 if getattr(layer, n) is None else wide(getattr(layer, n))[e]
        for n in ("gate_bias", "up_bias", "down_bias")
    }
    x = x if layer.latent_in is None else x @ wide(layer.latent_in)
    gate = None if layer.gate is None else x @ wide(layer.gate)[e] + bias["gate_bias"]
    hidden = gated_by_hand(c, BY_HAND[c.activation], gate, x @ wide(layer.up)[e] + bias["up_bias"])
    out = hidden @ wide(layer.down)[e] + bias["down_bias"]
    return out if layer.latent_out is None else out @ wide(layer.latent_out)


def unchanged_by_hand(layer, x):
    """What a zero expert returns to the stream."""
    return x if layer.latent_in is None else x @ wide(layer.latent_in) @ wide(layer.latent_out)


def experts_by_hand(layer, x, positions, room=math.inf):
    """Token by token. An expert takes `room` tokens of a row; the number of those that found none comes along."""
    out, dropped = np.zeros_like(x), 0

    def normed(name, y):
        return y if layer.norms is None else norm_by_hand(getattr(layer.norms, name), y)

    for b in range(len(x)):
        taken = [0] * layer.config.num_choices
        for t in range(x.shape[1]):
            routed, shared = normed("pre_routed", x[b, t]), normed("pre_shared", x[b, t])
            if positions[b, t] >= 0:
                for e, weight in zip(*route_by_hand(layer.router, x[b, t])[:2], strict=True):
                    taken[e] += 1
                    if e >= layer.config.num_experts:
                        out[b, t] += weight * unchanged_by_hand(layer, routed)
                    elif taken[e] > room:
                        dropped += 1
                    elif layer.config.router.input_scaling:
                        out[b, t] += expert_by_hand(layer, e, weight * routed)
                    else:
                        out[b, t] += weight * expert_by_hand(layer, e, routed)
            bias = 0.0 if layer.out_bias is None else wide(layer.out_bias)
            out[b, t] = normed("post_routed", out[b, t] + bias)
            if layer.shared is not None:
                gate = 1.0 if layer.shared_gate is None else 1 / (1 + math.exp(-x[b, t] @ wide(layer.shared_gate)))
                out[b, t] += normed("post_shared", gate * mlp_by_hand(layer.shared, shared))
    return out, dropped


def sees(mask, q, k, same):
    causal = 0 <= k <= q and same
    if isinstance(mask, SlidingWindow):
        return causal and q - k < mask.size
    if isinstance(mask, Chunked):
        return causal and q // mask.size == k // mask.size
    if isinstance(mask, Bidirectional):
        return min(q, k) >= 0 and same and (mask.size is None or q // mask.size == k // mask.size)
    return causal


def project(x, weight, bias):
    y = np.einsum("bte,ehd->bthd", x, wide(weight))
    return y if bias is None else y + wide(bias)


def ready_by_hand(layer, x, norm, scales, positions):
    """Queries or keys: normalised and rotated, row by row."""
    config, out = layer.config, np.array(x)
    for b, t in np.ndindex(x.shape[:2]):
        row = x[b, t]

        def normalise(row):
            if config.qk_norm.over == "heads":
                return norm_by_hand(norm, row.reshape(-1)).reshape(row.shape)
            heads = np.stack([norm_by_hand(norm, head) for head in row])
            return heads if scales is None else heads * wide(scales)

        if config.qk_norm and config.qk_norm.when == "before_rope":
            row = normalise(row)
        row = np.clip(row, -config.qkv_clip, config.qkv_clip) if config.qkv_clip else row
        if config.rope:
            table = plain_frequencies(config.rope.theta, config.head_dim)
            row = np.stack([rotate_by_hand(h, max(positions[b, t], 0), table, config.rope.pairing) for h in row])
        if config.qk_norm and config.qk_norm.when == "after_rope":
            row = normalise(row)
        out[b, t] = row
    return out


def heads_by_hand(layer, x):
    """Query, key and value, before norm and rotation."""
    c = layer.config
    if c.fused_qkv:
        return np.split(project(x, layer.qkv, layer.qkv_bias), [c.num_heads, c.num_heads + c.num_kv_heads], axis=2)
    query, key = project(x, layer.query, layer.query_bias), project(x, layer.key, layer.key_bias)
    return query, key, key if c.shared_kv else project(x, layer.value, layer.value_bias)


def slopes_by_hand(heads, most):
    """The paper's slopes: of powers of two a geometric series, else those of the next two."""

    def series(count):
        return [2 ** (-most * (h + 1) / count) for h in range(count)]

    below = 2 ** int(math.log2(heads))
    return series(below) + series(2 * below)[::2][: heads - below]


def attention_by_hand(layer, x, positions, segments):
    c = layer.config
    query, key, value = heads_by_hand(layer, x)
    query = ready_by_hand(layer, query, layer.query_norm, layer.query_norm_scale, positions)
    key = ready_by_hand(layer, c.key_scale * key, layer.key_norm, layer.key_norm_scale, positions)
    if layer.value_norm is not None:
        value = np.apply_along_axis(lambda vector: norm_by_hand(layer.value_norm, vector), -1, value)
    value = c.value_scale * (np.clip(value, -c.qkv_clip, c.qkv_clip) if c.qkv_clip else value)
    mixed = np.zeros((*query.shape[:3], value.shape[3]))
    slopes = slopes_by_hand(c.num_heads, c.alibi.max_exponent) if c.alibi else None
    for b, t, h in np.ndindex(query.shape[:3]):
        kv = h // (c.num_heads // c.num_kv_heads)
        top, bottom = 0.0, 0.0 if layer.sink is None else math.exp(float(layer.sink[h]))
        for s in range(x.shape[1]):
            if sees(c.mask, positions[b, t], positions[b, s], segments[b, s] == segments[b, t]):
                score = float(query[b, t, h] @ key[b, s, kv]) * (c.query_scale or c.head_dim**-0.5)
                score += c.alibi.scale * slopes[h] * (positions[b, s] - positions[b, t]) if c.alibi else 0.0
                score = c.soft_cap * math.tanh(score / c.soft_cap) if c.soft_cap else score
                top, bottom = top + math.exp(score) * value[b, s, kv], bottom + math.exp(score)
        mixed[b, t, h] = top / bottom if bottom else 0.0
    if layer.gate is not None:
        mixed = mixed / (1 + np.exp(-project(x, layer.gate, None)))
    if layer.inner_norm is not None:
        rows = mixed.reshape(*x.shape[:2], -1)
        rows = np.apply_along_axis(lambda vector: norm_by_hand(layer.inner_norm, vector), -1, rows)
        mixed = rows.reshape(mixed.shape)
    out = np.einsum("bthd,hde->bte", mixed, wide(layer.out))
    return out if layer.out_bias is None else out + wide(layer.out_bias)
