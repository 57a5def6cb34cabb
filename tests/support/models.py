"""Equations of the models in numpy, and models compared with theirs."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.models import Dcnv2, Dhen, DhenDlrm, Dlrm, Mmoe, Wukong
from tests import support
from tests.support.nn import ACTIVATIONS, initialized, normalized

B, DENSE, F, D = 8, 5, 3, 12


def inputs(num_dense=DENSE, batch=B, dim=D):
    """Returns dense features [B, n] and embeddings [B, F, D]."""
    return support.normal(batch, num_dense), support.normal(batch, F, dim, seed=1)


class Equations:
    """Parts of the models' equations; biases and norms are those of the parameters."""

    def __init__(self, model):
        self.model = model

    def normalize(self, x, params, name):
        return normalized(x, self.model.norm, params.get(name))

    def dense(self, params, x):
        return x @ params["kernel"] + params.get("bias", 0.0)

    def mlp(self, params, x, ends_linear=False):
        count = sum(name.startswith("dense_") for name in params)
        for i in range(count):
            x = self.dense(params[f"dense_{i}"], x)
            if not (ends_linear and i == count - 1):
                x = self.normalize(x, params, f"norm_{i}")
                x = ACTIVATIONS[self.model.activation](x)
        return x

    def head(self, params, x):
        return (x @ params["kernel"] + params["bias"])[:, 0]

    def cross_net(self, params, x0):
        x = x0
        for i in range(sum(name.startswith("u_") for name in params)):
            hidden = x @ params[f"v_{i}"]["kernel"] if f"v_{i}" in params else x
            x = x0 * self.dense(params[f"u_{i}"], hidden) + x
        return x


def padded(x):
    """Returns rows padded to a multiple of 16 columns, as few as the tests have."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % 16)))


def pairs(z):
    n = z.shape[1]
    return np.stack(
        [np.sum(z[:, i] * z[:, j], -1) for i in range(n) for j in range(i)], axis=1
    )


def flat(x):
    return x.reshape(len(x), -1)


# The models.


def dlrm_features(eq, params, dense, embeddings):
    """Returns what the top MLP of DLRM reads."""
    z, bottom = embeddings, np.zeros((len(dense), 0))
    if dense.shape[1]:
        bottom = eq.mlp(params["bottom_mlp"], dense)
        z = np.concatenate([bottom[:, None], embeddings], axis=1)
    if eq.model.interaction == "cat":
        return padded(flat(z))
    return padded(np.concatenate([bottom, pairs(z)], axis=1))


def dlrm(eq, params, dense, embeddings):
    features = dlrm_features(eq, params, dense, embeddings)
    return eq.head(params["head"], eq.mlp(params["top_mlp"], features))


def mmoe(eq, params, dense, embeddings):
    experts, tasks = eq.model.num_experts, eq.model.num_tasks
    x = dlrm_features(eq, params, dense, embeddings)
    f = [eq.mlp(params[f"expert_{i}"], x) for i in range(experts)]
    logits = []
    for t in range(tasks):
        gate = np.ones((len(x), 1))
        if experts > 1:
            columns = slice(t * experts, (t + 1) * experts)
            gate = np.exp(x @ params["gates"]["kernel"][:, columns])
            gate /= gate.sum(axis=1, keepdims=True)
        mixed = sum(gate[:, i : i + 1] * f[i] for i in range(experts))
        logits.append(eq.head(params[f"head_{t}"], eq.mlp(params[f"tower_{t}"], mixed)))
    return np.stack(logits, axis=1) if tasks > 1 else logits[0]


def dcnv2(eq, params, dense, embeddings):
    if "bottom_mlp" in params:
        dense = eq.mlp(params["bottom_mlp"], dense)
    x0 = padded(np.concatenate([flat(embeddings), dense], axis=1))
    crossed = eq.cross_net(params["cross"], x0)
    if eq.model.structure == "stacked":
        return eq.head(params["head"], eq.mlp(params["deep_mlp"], crossed))
    deep = eq.mlp(params["deep_mlp"], x0)
    return eq.head(params["head"], np.concatenate([crossed, deep], axis=1))


def stacked(eq, params, dense, embeddings, layer, features=None):
    x = embeddings.reshape(len(embeddings), F * eq.model.embeddings_per_field, -1)
    if dense.shape[1]:
        bottom = eq.mlp(params["bottom_mlp"], dense)
        x = np.concatenate([bottom.reshape(len(x), -1, x.shape[2]), x], axis=1)
    first = x
    for i in range(eq.model.num_layers):
        x = layer(eq, params[f"layer_{i}"], x)
    top = flat(x) if features is None else features(eq, params, first, x)
    return eq.head(params["head"], eq.mlp(params["top_mlp"], top))


def compress(params, x):
    return np.einsum("nm,bnd->bmd", params["kernel"], x)


def residual(params, x):
    """Returns x, or combinations of its embeddings where their number changes."""
    return compress(params["residual"], x) if "residual" in params else x


def wukong_layer(eq, params, x):
    (batch, n, d), k = x.shape, eq.model.k
    if "fm_lcb" in params:
        weight = params["fm_lcb"]["kernel"]
        y, lcb = weight[None, :, :k], {"kernel": weight[:, k:]}
    else:
        attended = flat(compress(params["attended"], x))
        y = eq.mlp(params["attention"], attended, ends_linear=True)
        y, lcb = y.reshape(batch, n, k), params["lcb"]
    fm = flat(np.einsum("bnd,bmd->bnm", x, x) @ y)  # by the gram matrix
    if eq.model.norm == "block":  # of whole rows
        fm = normalized(fm, "rms")
    else:
        fm = eq.normalize(fm, params, "fm_norm")
    fmb = eq.mlp(params["fmb"], fm, ends_linear=True).reshape(batch, -1, d)
    out = np.concatenate([fmb, compress(lcb, x)], axis=1)
    return eq.normalize(out + residual(params, x), params, "norm")


def dhen_layer(eq, params, x):
    made = []
    if "dot_mlp" in params:
        dot = eq.mlp(params["dot_mlp"], padded(pairs(x)), ends_linear=True)
        made.append(dot.reshape(len(x), -1, x.shape[2]))
    if "cross" in params:
        crossed = eq.cross_net(params["cross_net"], flat(x)).reshape(x.shape)
        made.append(compress(params["cross"], crossed))
    if "linear" in params:
        made.append(compress(params["linear"], x))
    if "attention" in params:
        made.append(compress(params["attention"], encoded(eq, params, x)))
    is_sum = eq.model.ensemble == "sum"
    out = sum(made) if is_sum else np.concatenate(made, axis=1)
    return eq.normalize(out + residual(params, x), params, "norm")


def encoded(eq, params, x):
    """Returns what the attention module of DHEN makes of the embeddings."""
    attention, heads = params["self_attention"], eq.model.num_heads
    qkv = eq.dense(attention["qkv"], x)
    seen = []
    for q, k, v in zip(
        *(np.split(a, heads, axis=2) for a in np.split(qkv, 3, axis=2)), strict=True
    ):
        shares = np.exp(np.einsum("bnd,bmd->bnm", q, k) / np.sqrt(q.shape[2]))
        seen.append(shares / shares.sum(2, keepdims=True) @ v)
    out = eq.dense(attention["out"], np.concatenate(seen, axis=2))
    h = eq.normalize(x + out, params, "attention_norm")
    ffn = eq.mlp(params["ffn"], flat(h).reshape(-1, x.shape[2]), ends_linear=True)
    return eq.normalize(h + ffn.reshape(h.shape), params, "ffn_norm")


def mixed(eq, params, first, last):
    """Returns what the top MLP of the mix reads."""
    crossed = eq.cross_net(params["cross_net"], flat(first))
    joined = np.concatenate([flat(last), pairs(first), crossed], axis=1)
    rest = -joined.shape[1] % 64
    rest = rest if 8 * rest <= joined.shape[1] + rest else -joined.shape[1] % 16
    return np.pad(joined, ((0, 0), (0, rest)))


STACK = dict(bottom_mlp=(24,), dense_embeddings=2, num_layers=2, top_mlp=(32,))
# By name: the model, small and with all sizes different, and its equations.
MODELS = {
    "dlrm": (Dlrm(bottom_mlp=(32,), top_mlp=(48, 20)), dlrm),
    "dcnv2": (Dcnv2(num_cross_layers=2, deep_mlp=(48, 20)), dcnv2),
    "mmoe": (
        Mmoe(bottom_mlp=(32,), expert_mlp=(48, 20), tower_mlp=(16,), num_experts=3),
        mmoe,
    ),
    "wukong": (
        Wukong(**STACK, fm_embeddings=4, lcb_embeddings=3, k=5, fmb_mlp=(24, 20)),
        functools.partial(stacked, layer=wukong_layer),
    ),
    "dhen": (
        Dhen(**STACK, dot=4, cross=2, linear=3, dot_mlp=(24,)),
        functools.partial(stacked, layer=dhen_layer),
    ),
    "mix": (
        DhenDlrm(**STACK, dot=3, cross=None, linear=2, dot_mlp=(24,)),
        functools.partial(stacked, layer=dhen_layer, features=mixed),
    ),
}


def assert_follows(name, *, num_dense=DENSE, train=False, **options):
    """Asserts that a model's logits in float32 are those of its equations."""
    model, reference = MODELS[name]
    model = model.clone(recipe="f32", **options)
    args = inputs(num_dense, dim=D * options.get("embeddings_per_field", 1))
    variables = initialized(model, *args)

    @jax.jit
    def apply(variables, *args):
        return model.apply(variables, *args, train=train, mutable=["batch_stats"])[0]

    logits = apply(variables, *args)
    to_float64 = functools.partial(np.asarray, dtype=np.float64)
    params = jax.tree.map(to_float64, variables["params"])
    exact = reference(Equations(model), params, *map(to_float64, args))
    chex.assert_type(logits, jnp.float32)
    chex.assert_trees_all_close(
        logits, exact.astype(np.float32), rtol=1e-4, atol=1e-5 * np.abs(exact).max()
    )
