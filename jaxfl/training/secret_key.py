"""The secret key of a run that is published: drawn by the operating system, kept where only its owner reads."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxfl.core import ArgumentError, Array
from jaxfl.training.processes import on_all, on_first
from jaxfl.training.run_directory import PRIVATE, RunDirectory


def secret_key(run: RunDirectory) -> Array:
    """The key of this run: a new one of 64 bits, or that of the run that is resumed.

    It lies in private/key, mode 0600, so that a resumed run goes on with the same noise. Keep it from what you publish:
    with it anyone can take the noise off. Threefry keys hold 64 bits, so an attacker who can try 2^64 keys finds it.

    Args:
        run: from `jaxfl.training.open_run`.

    Returns:
        A typed key, shape (), for `train(key=)`.

    Raises:
        ArgumentError: the run is resumed, and its key is missing, is none, or others can read it; it would lie behind a
            link.

    Guarantees:
        - the key is nowhere else in the run directory.
        - nobody but the owner can read the file.
    """
    path = run.path / PRIVATE / "key"
    on_first(_draw)(run, path)
    words = on_all(_words)(path)
    data = jnp.array([int.from_bytes(words[:4]), int.from_bytes(words[4:])], jnp.uint32)
    return jax.random.wrap_key_data(data)


def _draw(run: RunDirectory, path: Path) -> None:
    """Write the key of a new run."""
    if path.parent.is_symlink() or path.is_symlink():
        found = "it, or its folder, is a link"
        raise ArgumentError("seed_from_os", f"{path} must lie in the run directory", found, "Remove the link.")
    if not run.resumed:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(8) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _words(path: Path) -> bytes:
    """The eight bytes of the key."""
    try:
        words = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError):
        words = b""
    if words and os.name == "posix" and path.stat().st_mode & 0o077:
        found = f"it has mode {path.stat().st_mode & 0o777:04o}"
        remedy = f"chmod 600 {path}, if nobody else has read it; else start again with another out."
        raise ArgumentError("seed_from_os", f"{path} must be readable by its owner alone", found, remedy)
    if len(words) != 8:
        remedy = "Restore the file, or start again with another out."
        raise ArgumentError("seed_from_os", f"needs the run's key in {path}", "there is none", remedy)
    return words
