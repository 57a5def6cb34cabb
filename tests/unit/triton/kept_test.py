"""Kernels that an earlier process compiled are found; damaged ones are made again."""

import dataclasses

import pytest

from loka_jax.triton import kept


@dataclasses.dataclass
class _Made:
    binary: str
    shared_mem_bytes: int


def test_a_kernel_is_compiled_once_for_its_source_and_options(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept, "_versions", lambda: ["3"])
    asked = []

    def make(module, backend, *rest):
        asked.append((module, *rest))
        return _Made(f"code of {module}", len(asked))

    def compiled(module="m", options="warps=4"):
        return kept._kept(make, _Made, module, object(), options, 90, "cuda")

    first = compiled()
    assert compiled() == first == _Made("code of m", 1) and len(asked) == 1
    assert compiled(options="warps=8").shared_mem_bytes == 2
    assert compiled("n") == _Made("code of n", 3)
    monkeypatch.setattr(kept, "_versions", lambda: ["4"])
    assert compiled().shared_mem_bytes == 4
    files = [*tmp_path.rglob("*.json")]
    assert len(files) == 4
    for damaged in ("", '{"binary": 7, "shared_mem_bytes": 1}'):
        for file in files:
            file.write_text(damaged)
        made = len(asked)
        assert compiled().shared_mem_bytes == len(asked) == made + 1
        assert compiled().shared_mem_bytes == len(asked) == made + 1


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept, "_versions", lambda: ["3"])

    def fails(*_):
        raise OSError("no space")

    monkeypatch.setattr(kept.jsonfile, "write", fails)
    make = lambda *_: _Made("code", 1)  # noqa: E731
    assert kept._kept(make, _Made, "m", object()) == _Made("code", 1)


def test_jax_triton_has_what_is_kept(monkeypatch):
    triton_lib = pytest.importorskip("jax_triton.triton_lib", exc_type=ImportError)
    name = "compile_ttir_to_ptx_inplace"
    monkeypatch.setattr(triton_lib, name, getattr(triton_lib, name))
    kept.keep.__wrapped__()  # a test before may have taken back what it did
    assert triton_lib.compile_ttir_to_ptx_inplace.func is kept._kept
    assert all(kept._versions())
    names = {x.name for x in dataclasses.fields(triton_lib.CompilationResult)}
    assert {"binary", "name", "shared_mem_bytes"} <= names
