"""Programs of the Triton kernels, compiled for Hopper without a GPU.

None may spill registers, and memory must be read and written 16 bytes at a time.
"""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from loka_jax.fp8 import E4M3, E5M2, Fp8Array
from loka_jax.normed import Epilogue, NormVectors
from loka_jax.ops import embedding
from loka_jax.optim.rows import Adam, RowwiseAdagrad, Sgd
from loka_jax.packed import Packing
from loka_jax.tails import Dropout, Forms, Outer, Scale, Scaled, TailResiduals
from loka_jax.triton import (
    dot_features,
    gated_norm,
    matmul,
    merge,
    packed,
    route,
    row_update,
    row_wire,
    tails,
)
from tests.support import hopper
from tests.support.triton import (
    compiled,
    compiled_programs,
    skip_without_triton,
    spilled_bytes,
)

skip_without_triton()

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
ROWS, TILES = (None, None), ((1, 128), (128, 128))
LOADS, STORES = "ld.global.v4", "st.global.v4"


def shape(*sizes, dtype=BF16):
    return jax.ShapeDtypeStruct(sizes, dtype)


# Products.


def matmul_of(sizes, formats, tiles, fast, config):
    """Returns the program of a product, of rows where tiles are None."""
    m, k, n = sizes

    def f(lhs, rhs):
        operands = map(Fp8Array, *zip(lhs, rhs, strict=True), tiles)
        rest = dict(fast_accumulation=fast, config=config)
        return matmul.fp8_matmul(*operands, out_dtype=BF16, **rest)

    def operand(rows, dtype, tile):
        by_rows, by_columns = tile or (1, k)
        scales = math.ceil(rows / by_rows), math.ceil(k / by_columns)
        return shape(rows, k, dtype=dtype), shape(*scales, dtype=F32)

    return compiled(f, *map(operand, (m, n), formats, tiles))


@pytest.mark.parametrize(
    "formats, tiles, fast",
    [
        ("e4m3 e5m2", ROWS, True),
        ("e5m2 e4m3", ROWS, False),
        ("e5m2 e4m3", TILES, False),
    ],
)
def test_configs_of_products_run_on_the_fp8_tensor_cores(formats, tiles, fast):
    sizes, names = (65536, 528, 520), formats.split()
    space = matmul.search_space(*sizes, one_sum=fast)
    assert len(space) >= 10
    # Smaller blocks than those of the first half take fewer registers.
    for config in space[: len(space) // 2]:
        dtypes = (dict(e4m3=E4M3, e5m2=E5M2)[name] for name in names)
        program = matmul_of(sizes, dtypes, tiles, fast, config)
        assert program.shared_bytes <= 227 * 1024, config
        report = program.ptxas_report()
        assert spilled_bytes(report) == 0 and "serialized" not in report, config
        assert "wgmma.mma_async.sync.aligned" in program.ptx
        assert f"f32.{'.'.join(names)}" in program.ptx
        assert "cp.async.cg.shared.global" in program.ptx  # 16 bytes, with masks too


# Rows of tables.

ADAGRAD = RowwiseAdagrad(eps=1e-6, initial_accumulator=0.1)


def update_of(optimizer, n, dim, dtype=F32):
    """Returns an update of rows, and the types of its operands."""
    table, ids = shape(33_000_000, dim, dtype=F32), shape(n, dtype=I32)
    state = jax.eval_shape(optimizer.init, table)

    def update(table, state, ids, grads):
        operands = table, state, ids, grads, optimizer, 0.1
        return embedding.update_rows(*operands, implementation="triton")

    return update, (table, state, ids, shape(n, dim, dtype=dtype))


@pytest.mark.parametrize("optimizer, dim", [(ADAGRAD, 16), (Adam(), 128)], ids=str)
def test_programs_of_row_updates_add_once(optimizer, dim):
    n, shuffles = 1_703_936, []
    for dtype in (F32, BF16):
        step, operands = update_of(optimizer, n, dim, dtype)
        programs = compiled_programs(step, *operands)
        assert len(programs) == len(set(row_update.levels(n, dim)))
        spilled = [spilled_bytes(program.ptxas_report()) for program in programs]
        # ptxas spills a word or two even with registers to spare.
        assert spilled[0] == 0 and max(spilled) <= 16, spilled
        shuffles.append(programs[0].ptx.count("shfl.sync"))
    # Two dtypes may get the compiler to make two layouts of a tile, and sum both.
    assert shuffles[0] == shuffles[1]


@pytest.mark.parametrize("optimizer", [ADAGRAD, Sgd(), Adam()], ids=str)
def test_an_update_copies_no_table(optimizer):
    step, operands = update_of(optimizer, 1_703_936, 16)

    def donated(table, state, ids, noise):
        return step(table, state, ids, noise * embedding.lookup(table, ids))

    hlo = hopper.compiled(donated, *operands, donate_argnums=(0, 1))
    launches = [kernel.opcode for kernel in hopper.kernels(hlo)]
    assert launches.count("custom-call") == 3 and "copy" not in hlo


# Programs of rows, lists and vectors. Codes come in words of four at least.

N, PACKING = 1_703_936, Packing(2**24, 2, 128)
PUBLIC, G_UPPER = shape(32768, 27, 128), shape(32768, 378)
UPPER_BACK = dict(pairs="i <= j")
UPPER = UPPER_BACK | dict(width=378)
Z, BOTTOM, G = shape(65536, 26, 16), shape(65536, 16), shape(65536, 384)
WIDE, BYTES = shape(65536, 63, 256), shape(2, PACKING.row_bytes, dtype=jnp.uint8)
PACKED, WORDS = dict(packing=PACKING), ["st.global.v", "ld.global.v"]
TABLE, IDS = shape(10_000, 128, dtype=F32), shape(4, 1024, dtype=I32)
PAYLOAD = shape(4, 1024 * 16, dtype=jnp.uint16)
LISTS = shape(N, dtype=jnp.uint32), shape(N, dtype=I32)
RANDOM = shape(2, dtype=jnp.uint32)


@pytest.mark.parametrize(
    "run, operands, options, has",
    [
        (dot_features.dot_features, (BOTTOM, Z), dict(width=384), ["mma", LOADS]),
        (dot_features.dot_features, (None, WIDE), dict(width=1968), ["mma", LOADS]),
        (dot_features.dot_features_backward, (BOTTOM, Z, G), {}, ["mma", LOADS]),
        (dot_features.dot_features, (None, PUBLIC), UPPER, ["mma", LOADS]),
        (
            dot_features.dot_features_backward,
            (None, PUBLIC, G_UPPER),
            UPPER_BACK,
            ["mma", LOADS],
        ),
        (row_wire.encode, (TABLE, IDS), dict(codec="e4m3"), WORDS),
        (row_wire.encode, (TABLE, IDS, RANDOM), dict(codec="int8"), WORDS),
        (row_wire.decode, (PAYLOAD, LISTS[1]), dict(codec="bf16", dim=16), WORDS),
        (route.lists, LISTS, dict(owners=16, part=10**8, capacity=43336), []),
        (merge.merge_lists, (shape(16, 43336, dtype=I32),), {}, []),
        (packed.pack, (shape(2**24, dtype=F32), RANDOM), PACKED, ["st.global"]),
        (packed.sum_packed, (BYTES, RANDOM), PACKED, ["st.global"]),
        (packed.unpack, (BYTES,), PACKED, ["ld.global"]),
    ],
)
def test_programs_do_not_spill_and_move_whole_words(run, operands, options, has):
    for program in compiled_programs(functools.partial(run, **options), *operands):
        assert spilled_bytes(program.ptxas_report()) == 0
        assert all(access in program.ptx for access in has)
        if options == PACKED:
            assert f"{has[0]}.b8" not in program.ptx


@pytest.mark.parametrize("n", [256, 512, 1024, 4096])
def test_programs_of_gated_norms_do_not_spill(n):
    def run(dy, u, x, gamma, beta, words):
        operands = u, x, NormVectors(None, gamma, beta), Dropout(words, 0.2)
        y = gated_norm.gated_norm(*operands, epsilon=1e-6)
        return y, gated_norm.gated_norm_backward(dy, *operands, epsilon=1e-6)

    rows, vector = shape(65521, n), shape(n, dtype=F32)
    operands = shape(65521, 3 * n), rows, rows, vector, vector, RANDOM
    for program in compiled_programs(run, *operands):
        assert spilled_bytes(program.ptxas_report()) == 0
        assert STORES in program.ptx


# Tails of odd sizes, which are read and written 16 bytes at a time where padded.

M, ODD, WITH_SUM = 65521, 3441, dict(has_row_sum=True)
PADDED = dict(shape=(M, ODD), padded=True)
ALL = Forms(fp8=E4M3, transposed=True, amax=True, **PADDED)
GRADIENT = Forms(bf16=False, fp8=E5M2, transposed=True, amax=True, **PADDED)


def under(scale, want):
    return dataclasses.replace(want, scale_inv=scale)


def cross(at, want, *args, **options):
    want = want if want.fp8 is None else under(at.scale, want)
    return tails.cross_tail(*args, want=want, **options)


def split(at):
    gradients = [at.z8, at.z8], [at.z8], [at.outer]
    args = gradients, [at.z8] * 2, [at.row] * 2, at.z8
    parts = [shape(M, n) for n in (ODD - 416, 416)]
    return tails.cross_gradient(*args, parts=parts, shape=(M, ODD))


def join(at):
    parts = at.x[:M, : ODD - 416], at.x[:M, :416]
    return tails.joined_cast(*parts, want=under(at.scale, ALL))


def norm(at, name):
    vectors = NormVectors(None, at.row) if name == "rms" else NormVectors(at.row)
    activation = {"none": "exact_gelu", "block": "tanh"}.get(name, "swish")
    options = dict(epilogue=Epilogue(name, activation), want=under(at.scale, ALL))
    return tails.norm_tail([at.z, Scaled(at.x)], vectors, **options)


def norm_backward(at, name, order):
    """Returns gradients behind an activation in an order, of whole rows or none."""
    epilogue = Epilogue(name, "swish", order=order)
    vectors = NormVectors(at.row, at.row) if name == "rms" else NormVectors(at.row)
    kept = TailResiduals(at.x, at.column, at.z)
    if epilogue.multiplies:
        kept = TailResiduals(product=at.z, factor=at.z)
    options = dict(epilogue=epilogue, want=under(at.scale, GRADIENT))
    return tails.norm_tail_backward([at.z], kept, vectors, **options)


@pytest.mark.parametrize(
    "f, access",
    [
        (lambda a: norm_backward(a, "rms", "act_sum_norm"), STORES),
        (lambda a: norm_backward(a, "none", "norm_act_mul"), STORES),
        (lambda a: cross(a, ALL, [a.z] * 3, a.z, a.row), STORES),
        (lambda a: cross(a, GRADIENT, [a.z8] * 3, a.z8, **WITH_SUM), STORES),
        (lambda a: cross(a, GRADIENT, [a.outer, a.z8], a.z8, **WITH_SUM), STORES),
        (lambda a: cross(a, Forms(bf16=False), [a.z8], a.z8, a.row, a.row), LOADS),
        (split, LOADS),
        (join, STORES),
        *((functools.partial(norm, name=x), STORES) for x in ("rms", "none", "block")),
    ],
)
def test_programs_of_tails_do_not_spill(f, access):
    def run(x, x8, scales, column, row):
        first, second, scale = (Scale(scales, i) for i in (3, 5, 7))
        outer = Outer(column, row)
        at = SimpleNamespace(x=x, row=row, column=column, scale=scale, outer=outer)
        at.z, at.z8 = Scaled(x, (first, second)), Scaled(x8, (first,))
        return f(at)

    padded = M + -M % 16, ODD + -ODD % 16
    vectors = (shape(size, dtype=F32) for size in (12, M, ODD))
    operands = shape(*padded), shape(*padded, dtype=E4M3), *vectors
    *statistics, program = compiled_programs(run, *operands)
    assert access in program.ptx
    for each in (*statistics, program):
        assert spilled_bytes(each.ptxas_report()) == 0
