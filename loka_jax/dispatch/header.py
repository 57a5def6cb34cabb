"""The device, versions and sources that measurements hold for."""

import dataclasses
import importlib.metadata
import pathlib
import re

import jax

from loka_jax.dispatch import sources

# How many parts of a version count: compilers and libraries change with minor ones, the
# driver with its branch.
_PARTS = {"jax": 2, "jaxlib": 2, "cuda": 2, "cublas": 2, "driver": 1}
# Where one is not known, measurements hold for any.
_MAY_LACK = ("triton", "cuda", "cublas", "driver")
_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


@dataclasses.dataclass(frozen=True)
class Header:
    """The device, versions and sources of a table's measurements.

    Attributes:
        device_kind: as JAX names it.
        triton: versions of jax-triton and Triton; empty if they are not installed.
        kernels: digest of the sources, see `sources.digest`.
        cuda, cublas, driver: versions; empty where they are not known.
    """

    device_kind: str
    jax: str
    jaxlib: str
    triton: str
    kernels: str
    cuda: str = ""
    cublas: str = ""
    driver: str = ""

    def why_not(self, here: "Header") -> str | None:
        """Returns which part differs here, or None.

        A machine without Triton runs none of its candidates, and the times of others
        hold there. So they do for any version that was not kept. Of others, patch
        versions do not count.
        """
        for name, measured, current in self._pairs(here):
            is_missing = name in _MAY_LACK and not (measured and current)
            parts = _PARTS.get(name)
            if is_missing or measured.split(".")[:parts] == current.split(".")[:parts]:
                continue
            if name == "kernels":
                return "the kernels have changed since"
            name = name.replace("_", " ")
            return f"it was measured with {name} {measured}, but here it is {current}"
        return None

    def patches(self, here: "Header") -> list[str]:
        """Returns a phrase for each patch version that differs where this one holds."""
        return [
            f"{name} {measured}, and here it is {current}"
            for name, measured, current in self._pairs(here)
            if name in _PARTS and measured and current and measured != current
        ]

    def filled(self, other: "Header") -> "Header":
        """Returns this header with the versions that it lacks and the other has."""
        lacking = {n: theirs for n, own, theirs in self._pairs(other) if not own}
        return dataclasses.replace(self, **lacking)

    def _pairs(self, other: "Header") -> list[tuple[str, str, str]]:
        names = (field.name for field in dataclasses.fields(self))
        return [(name, getattr(self, name), getattr(other, name)) for name in names]


def header_here() -> Header:
    """Returns the header of a table that holds in this process."""
    device = jax.devices()[0]
    cuda = cuda_version(device.client.platform_version)
    triton = _version("jax-triton"), _version("triton")
    cublas = _version("nvidia-cublas") or _version("nvidia-cublas-cu12")
    return Header(
        device_kind=device.device_kind,
        jax=jax.__version__,
        jaxlib=_version("jaxlib"),
        triton=" ".join(triton) if all(triton) else "",
        kernels=sources.digest(),
        cuda=cuda,
        cublas=cublas if cuda else "",
        driver=driver_version() if cuda else "",
    )


def cuda_version(platform_version: str) -> str:
    """Returns the CUDA version of "cuda 13000", 13.0; empty where there is none."""
    found = re.search(r"cuda (\d+)", platform_version)
    return f"{int(found[1]) // 1000}.{int(found[1]) % 1000 // 10}" if found else ""


def driver_version(file: pathlib.Path = _DRIVER) -> str:
    """Returns the version of NVIDIA's driver; empty where the system does not say."""
    try:
        found = re.search(r"\s(\d+(\.\d+)+)\s", file.read_text(encoding="utf-8"))
    except OSError:
        return ""
    return found[1] if found else ""


def _version(package: str) -> str:
    """Returns the installed version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
