"""Description of the machine in config.json."""

import importlib.metadata
from types import SimpleNamespace

import jax

from jaxfl.training import environment
from jaxfl.training.environment import describe_environment

DRIVER = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""


def test_a_gpu_is_described_with_its_driver_and_cudnn(tmp_path, monkeypatch):
    (tmp_path / "version").write_text(DRIVER)
    real = importlib.metadata.version
    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.12.0.46" if "cudnn" in name else real(name))
    assert describe_environment()["driver"] is None  # of a CPU's run it decides nothing
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")])
    described = describe_environment()
    assert (described["driver"], described["cudnn"], described["device_kind"]) == (
        "580.65.06",
        "9.12.0.46",
        "NVIDIA H200",
    )


def test_what_the_system_does_not_tell_is_none(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "version")
    assert environment._driver() is None
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert environment._cudnn() is None


def test_flags_are_described(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", " --xla_tpu_a=1  --b ")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_force_host_platform_device_count=3")
    described = describe_environment()
    assert described["libtpu_flags"] == "--xla_tpu_a=1 --b"
    assert described["xla_flags"] == "--xla_gpu_deterministic_ops=true"
