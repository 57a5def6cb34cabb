"""The user's cache folder: private, or a temporary one in its place."""

import pytest

from loka_jax.cache_folder import cache_folder


def test_it_is_private_and_under_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    want = tmp_path / "home" / "loka_jax" / "data"
    for _ in range(2):
        assert cache_folder("data") == want
        assert want.stat().st_mode & 0o777 == 0o700
        want.chmod(0o755)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("data") == tmp_path / ".cache" / "loka_jax" / "data"


@pytest.mark.parametrize("is_link", [False, True])
def test_a_temporary_one_does_as_well_and_is_the_same_for_all(
    tmp_path, monkeypatch, is_link
):
    home = tmp_path / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    if is_link:
        (home / "loka_jax").mkdir(parents=True)
        (home / "loka_jax" / "data").symlink_to(tmp_path)
    else:
        home.write_text("")
    found = cache_folder("data")
    assert found.is_dir() and tmp_path not in found.parents
    assert cache_folder("data") == found != cache_folder("dispatch")
