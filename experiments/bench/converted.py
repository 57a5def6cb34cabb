"""Trains two public Flax models, written by others, converted by `nn.convert`.

    git clone https://github.com/PAIR-code/jax-recommenders runs/jax-recommenders
    git clone https://github.com/google/flax runs/flax
    python experiments/bench/converted.py --out converted.json

    ranker       CfDnn of jax-recommenders: the rating of an item, by an MLP of the user
    transformer  TransformerLM of Flax's example lm1b: the next token

The code of each is imported from its checkout as it is. An arm is the model as written,
in float32, or converted with a recipe. A seed draws weights, batches and dropout, which
the arms share. Every step has a new batch, so the loss of the last steps is that of
unseen examples. On a CPU, FP8 is emulated.
"""

import dataclasses
import functools
import importlib
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import linen

from experiments.bench import result as results
from loka_jax import nn
from loka_jax.measure.intervals import interval

AS_WRITTEN = "as written"
ARMS = (AS_WRITTEN, "bf16", "fp8_tensorwise_delayed", "fp8_rowwise")
USERS, ITEMS, TASTES = 256, 256, 4
TOKENS, LENGTH, OWN_NEXT = 64, 32, 0.8  # the last: chance of a token's own successor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the comparison.

    Attributes:
        jax_recommenders: a checkout of github.com/PAIR-code/jax-recommenders.
        flax: a checkout of github.com/google/flax.
        out: where to write the JSON; printed only if None.
        steps: of each training.
        last: steps whose mean loss is compared.
        seeds: number of seeds.
    """

    jax_recommenders: pathlib.Path = pathlib.Path("runs/jax-recommenders")
    flax: pathlib.Path = pathlib.Path("runs/flax")
    out: pathlib.Path | None = None
    steps: int = 300
    last: int = 100
    seeds: int = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Public:
    """A public model, and what it is trained on.

    Attributes:
        checkout: of the repository that has it.
        model: the model.
        skip: layers that stay as written.
        batch: returns the arguments of the model and its targets.
        loss: returns the loss of its output.
        learning_rate: of Adam.
    """

    checkout: pathlib.Path
    model: linen.Module
    skip: str | tuple[str, ...] = ()
    batch: Callable[[jax.Array], tuple[tuple, Any]]
    loss: Callable[[Any, Any], jax.Array]
    learning_rate: float

    def arm(self, name: str) -> Any:
        """Returns the model of an arm."""
        if name == AS_WRITTEN:
            return self.model
        return nn.convert(self.model, recipe=name, skip=self.skip)


def load(checkout: pathlib.Path, name: str) -> types.ModuleType:
    """Returns a module of a checkout, without what its packages import beside it.

    Raises:
        ValueError: if the checkout does not have it.
    """
    parts = name.split(".")
    if not checkout.joinpath(*parts).with_suffix(".py").exists():
        raise ValueError(
            f"{checkout} has no {name}: name a checkout of its repository."
        )
    for depth in range(1, len(parts)):
        package = types.ModuleType(".".join(parts[:depth]))
        package.__path__ = [str(checkout.joinpath(*parts[:depth]))]
        sys.modules[package.__name__] = package
    return importlib.import_module(name)


def ranker(checkout: pathlib.Path) -> Public:
    """Returns the model of ratings; they follow from the tastes of user and item."""
    module = load(checkout, "recommenders.cfdnn.model_cfdnn")
    users, items = _tastes()

    def batch(key: jax.Array):
        keys = jax.random.split(key, 3)
        user = jax.random.randint(keys[0], (512,), 0, USERS)
        item = jax.random.randint(keys[1], (512,), 0, ITEMS)
        liking = jnp.tanh((users[user] * items[item]).sum(axis=1) / 2)
        rating = 3 + 2 * liking + 0.2 * jax.random.normal(keys[2], (512,))
        return ({"user_id": user, "item_id": item},), rating

    return Public(
        checkout=checkout,
        model=module.CfDnn(
            num_items=ITEMS, num_users=USERS, repr_size=64, layers=(128, 128, 64)
        ),
        batch=batch,
        loss=lambda out, rating: jnp.mean((out - rating) ** 2),
        learning_rate=3e-3,
    )


def transformer(checkout: pathlib.Path) -> Public:
    """Returns the language model; most tokens are followed by one of their own."""
    module = load(checkout, "examples.lm1b.models")
    config = module.TransformerConfig(
        vocab_size=TOKENS,
        output_vocab_size=TOKENS,
        emb_dim=64,
        num_heads=4,
        num_layers=2,
        qkv_dim=64,
        mlp_dim=256,
        max_len=LENGTH,
    )
    successors = jax.random.permutation(jax.random.key(0), TOKENS - 1) + 1

    def batch(key: jax.Array):
        keys = jax.random.split(key, 3)
        others = jax.random.randint(keys[0], (LENGTH, 32), 1, TOKENS)
        is_own = jax.random.bernoulli(keys[1], OWN_NEXT, (LENGTH, 32))

        def following(token, drawn):
            other, own = drawn
            token = jnp.where(own, successors[token - 1], other)
            return token, token

        _, tokens = jax.lax.scan(following, others[0], (others, is_own))
        return (tokens.T,), tokens.T

    def loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return losses.mean()

    return Public(
        checkout=checkout,
        model=module.TransformerLM(config),
        skip="*/logitdense",
        batch=batch,
        loss=loss,
        learning_rate=1e-3,
    )


def _tastes() -> tuple[jax.Array, jax.Array]:
    """Returns the tastes of all users and items."""
    user_key, item_key = jax.random.split(jax.random.key(1))
    users = jax.random.normal(user_key, (USERS, TASTES))
    return users, jax.random.normal(item_key, (ITEMS, TASTES))


def trained(public: Public, arm: str, arguments: Arguments) -> list[list[float]]:
    """Returns the losses of an arm, step by step, for each seed."""
    model = public.arm(arm)
    optimizer = nn.overwriting(optax.adam(public.learning_rate))

    def loss_of(variables, inputs, targets, key):
        out = model.apply(variables, *inputs, rngs={"dropout": key})
        return public.loss(out, targets)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, key):
        variables, opt_state = state
        batch_key, dropout_key = jax.random.split(key)
        batch = public.batch(batch_key)
        loss, grads = jax.value_and_grad(loss_of)(variables, *batch, dropout_key)
        updates, opt_state = optimizer.update(grads, opt_state, variables)
        return (optax.apply_updates(variables, updates), opt_state), loss

    @jax.jit
    def start(key):
        inputs, _ = public.batch(key)
        variables = model.init(key, *inputs)
        return variables, optimizer.init(variables)

    runs = []
    for seed in range(arguments.seeds):
        keys = jax.random.split(jax.random.key(seed), arguments.steps + 1)
        state, losses = start(keys[0]), []
        for key in keys[1:]:
            state, loss = step(state, key)
            losses.append(loss)
        runs.append([float(loss) for loss in jax.device_get(losses)])
    return runs


def sites(public: Public, arm: str) -> list[dict[str, Any]]:
    """Returns the table of sites of a converted model."""
    inputs, _ = public.batch(jax.random.key(0))
    return [site.as_row() for site in nn.list_sites(public.arm(arm), *inputs)]


def compared(public: Public, arguments: Arguments) -> dict[str, Any]:
    """Returns the losses of all arms, paired differences from bf16, and the sites."""
    losses = {arm: trained(public, arm, arguments) for arm in ARMS}
    last = {
        arm: np.mean([run[-arguments.last :] for run in runs], axis=1)
        for arm, runs in losses.items()
    }
    arms = {
        arm: {
            "first": float(np.mean([run[0] for run in losses[arm]])),
            "last": float(last[arm].mean()),
            "over_bf16": interval(last[arm] / last["bf16"] - 1)._asdict(),
            "by_seed": last[arm].tolist(),
        }
        for arm in ARMS
    }
    commit = subprocess.run(
        ["git", "-C", public.checkout, "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return {
        "model": type(public.model).__name__,
        "repository": public.checkout.name,
        "commit": commit,
        "arms": arms,
        "sites": {arm: sites(public, arm) for arm in ARMS if arm != AS_WRITTEN},
    }


def main(arguments: Arguments):
    """Trains all models, prints and writes their losses."""
    models = {
        "ranker": ranker(arguments.jax_recommenders),
        "transformer": transformer(arguments.flax),
    }
    result = results.head("converted", arguments) | {"models": {}}
    for name, public in models.items():
        result["models"][name] = comparison = compared(public, arguments)
        for arm, numbers in comparison["arms"].items():
            over = numbers["over_bf16"]
            print(
                f"{name:12} {arm:24} {numbers['first']:.4f} {numbers['last']:.4f} "
                f"{over['mean']:+.3%} [{over['low']:+.3%}, {over['high']:+.3%}]",
                flush=True,
            )
    results.write(arguments.out, result)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
