"""The cache of compiled programs: where it is, what it keeps, what is wrong with it, and that no bit depends on it."""

import contextlib
import os
from pathlib import Path

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache
from processes import interrupted
from run_files import run_bytes
from toy_problem import toy_case, train_toy

from jaxfl.training import compilation_cache as cache
from jaxfl.training.compilation_cache import compilation_cache

SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_compilation_cache_max_size",
)


def settings():
    return {name: getattr(jax.config, name) for name in SETTINGS}


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A user's cache folder, and JAX as it is without the tests' own settings; programs of any size are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(cache, "MIN_COMPILE_SECONDS", 0.0)
    quiet = min(cache._READS_QUIETLY_ON_CPU, jax.__version_info__)  # this one may write to standard error here
    monkeypatch.setattr(cache, "_READS_QUIETLY_ON_CPU", quiet)
    before = settings()
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)  # that of the tests
    jax_cache.reset_cache()
    yield tmp_path / "user"
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


@pytest.fixture
def hits():
    """Programs that were read from the cache, so far."""
    seen = []

    def listen(event, **_):
        if event == "/jax/compilation_cache/cache_hits":
            seen.append(event)

    jax.monitoring.register_event_listener(listen)
    yield seen
    jax.monitoring.unregister_event_listener(listen)


VALUES = np.linspace(-2.0, 3.0, 50, dtype=np.float32).reshape(5, 10)


def compiled_anew(divisor=3):
    """A program that this process has not compiled, the same in every call, and its result."""

    def program(x):
        return jnp.tanh(x @ x.T).sum(axis=0) / divisor

    return np.asarray(jax.jit(program)(VALUES))


def entries(folder):
    return sorted(path for path in folder.rglob("*-cache") if path.name.startswith("jit_program-"))


class TestFolder:
    def test_default_is_in_the_users_cache(self, user):
        before = settings()
        with compilation_cache("default") as folder:
            assert folder is not None
            assert folder.parent == user / "jaxfl" / "compilation"
            assert settings()["jax_compilation_cache_dir"] == str(folder)
            compiled_anew()
        assert len(entries(folder)) == 1
        assert folder.stat().st_mode & 0o077 == 0, "code that is run: nobody else may write it"
        assert settings() == before

    def test_a_folder_of_ones_own(self, user):
        with compilation_cache(str(user / "own")) as folder:
            compiled_anew()
        assert folder is not None
        assert entries(user / "own") == entries(folder) != []

    def test_off_keeps_nothing_even_where_jax_was_told_a_folder(self, user):
        jax.config.update("jax_compilation_cache_dir", str(user / "told"))
        with compilation_cache("off") as folder:
            compiled_anew()
        assert folder is None
        assert not entries(user.parent)
        assert settings()["jax_compilation_cache_dir"] == str(user / "told")

    @pytest.mark.parametrize(
        ("name", "value"), [("jax_compilation_cache_dir", "told"), ("jax_enable_compilation_cache", False)]
    )
    def test_jaxs_own_variables_are_respected(self, user, name, value):
        jax.config.update(name, value)
        message = settings()
        with compilation_cache("default") as folder:
            assert folder is None
            assert settings() == message
        assert not user.exists()

    def test_a_version_that_would_write_to_standard_error_is_spared(self, user, monkeypatch):
        monkeypatch.setattr(jax, "__version_info__", (0, 8, 0))
        with compilation_cache("default") as folder:
            assert (folder is None) == (jax.default_backend() == "cpu")

    def test_a_folder_that_cannot_be_written_is_a_warning(self, user):
        user.write_text("no folder")
        run = contextlib.ExitStack()
        with pytest.warns(UserWarning, match=r"are not kept: .*: not a directory\. .*--compilation-cache off\."):
            folder = run.enter_context(compilation_cache("default"))
        with run:
            assert folder is None
            compiled_anew()

    def test_a_folder_that_others_can_write_to_is_not_used(self, user, monkeypatch):
        """Programs that are read there are run."""
        with compilation_cache("default") as folder:
            pass
        assert folder is not None
        folder.chmod(0o770)
        with pytest.warns(UserWarning, match="others can write there"), compilation_cache("default") as used:
            assert used is None
        folder.chmod(0o700)
        with compilation_cache("default") as used:
            assert used == folder
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        with pytest.warns(UserWarning, match="others can write there"), compilation_cache("default") as used:
            assert used is None

    def test_machines_with_other_processors_use_folders_of_their_own(self, monkeypatch):
        names = []
        for text in ("model name: A\nflags: avx\nMHz: 1", "model name: A\nflags: avx avx512f", "Features: sve"):
            monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
            names.append(cache._machine())
        monkeypatch.setattr(Path, "read_text", lambda self: "model name: A\nflags: avx\nMHz: 2\n")
        assert cache._machine() == names[0], "what changes from moment to moment does not count"
        assert len(set(names)) == 3

    def test_the_program_used_longest_ago_is_forgotten_first(self, user, monkeypatch):
        """Also where a process was killed before it wrote when it used one, which JAX alone does not survive."""
        kept = []
        with compilation_cache("default") as folder:
            for divisor in (3, 5):
                compiled_anew(divisor)
                kept += [path for path in entries(folder) if path not in kept]
        kept[0].with_name(kept[0].name.replace("-cache", "-atime")).unlink()
        os.utime(kept[0], (1e9, 1e9))
        monkeypatch.setattr(cache, "MAX_BYTES", int(2.5 * kept[0].stat().st_size))
        with compilation_cache("default"):
            compiled_anew(7)
        assert kept[0] not in entries(folder)
        assert kept[1] in entries(folder)
        assert len(entries(folder)) == 2


class TestPrograms:
    def test_a_program_is_read_again_with_the_same_bits(self, user, hits):
        plain = compiled_anew()
        with compilation_cache("default"):
            cold = compiled_anew()
        assert not hits
        with compilation_cache("default"):
            warm = compiled_anew()
        assert len(hits) == 1
        np.testing.assert_array_equal(cold, plain)
        np.testing.assert_array_equal(warm, plain)

    def test_no_bit_of_a_run_depends_on_it(self, user, hits, tmp_path):
        """Without a cache, and begun with an empty one, interrupted and resumed with a full one: the same lines."""

        def run(name, **options):
            cases = {"a": toy_case(seeds=(0,), num_rounds=6, evaluate_every=2)}
            train_toy(tmp_path / name, cases, compiled=True, **options)

        run("without")
        expected = run_bytes(tmp_path / "without")
        with compilation_cache("default"), interrupted(3), pytest.raises(KeyboardInterrupt):
            run("resumed")
        before = len(hits)
        with compilation_cache("default"):
            run("resumed", resume=True)
        assert run_bytes(tmp_path / "resumed") == expected
        assert len(hits) >= before + 3  # the state, the rounds, the evaluation
