"""The device, versions and sources that measurements hold for."""

import dataclasses

import jax

from loka_jax.dispatch import sources

# How many parts of a version count: compilers and libraries change with minor ones, the
# driver with its branch.
_PARTS = {"jax": 2, "jaxlib": 2, "cuda": 2, "cublas": 2, "driver": 1}
# Where one is not known, measurements hold for any.
_MAY_LACK = ("triton", "cuda", "cublas", "driver")


@dataclasses.dataclass(frozen=True)
class Header:
    """The device, versions and sources of a table's measurements.

    Attributes:
        device_kind: as JAX names it.
        jax, jaxlib: versions.
        triton: versions of jax-triton and Triton; empty if they are not installed.
        kernels: digest of the sources, see `sources.digest`.
        cuda, cublas, driver: versions; empty where they are not known, as in tables
            that were measured before they were kept.
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
        for field in dataclasses.fields(self):
            name, measured, current = field.name, *self._pair(here, field.name)
            is_missing = name in _MAY_LACK and not (measured and current)
            if is_missing or _counting(name, measured) == _counting(name, current):
                continue
            if name == "kernels":
                return "the kernels have changed since"
            name = name.replace("_", " ")
            return f"it was measured with {name} {measured}, but here it is {current}"
        return None

    def patches(self, here: "Header") -> list[str]:
        """Returns a phrase for each version that differs here in what does not count.

        Args:
            here: a header that these measurements hold for.
        """
        return [
            f"{name} {measured}, and here it is {current}"
            for name in _PARTS
            for measured, current in [self._pair(here, name)]
            if measured and current and measured != current
        ]

    def filled(self, other: "Header") -> "Header":
        """Returns this header with the versions that it lacks and the other has."""
        lacking = [name for name in _MAY_LACK if not getattr(self, name)]
        return dataclasses.replace(
            self, **{name: getattr(other, name) for name in lacking}
        )

    def _pair(self, here: "Header", name: str) -> tuple[str, str]:
        return getattr(self, name), getattr(here, name)


def _counting(name: str, version: str) -> list[str]:
    """Returns the parts of a version that matter for speed: 0 and 11 of jax 0.11.2."""
    return version.split(".")[: _PARTS.get(name)]


def header_here() -> Header:
    """Returns the header of a table that holds in this process."""
    device = jax.devices()[0]
    cuda = sources.cuda_version(device.client.platform_version)
    return Header(
        device_kind=device.device_kind,
        jax=jax.__version__,
        jaxlib=sources.version("jaxlib"),
        triton=sources.triton_versions(),
        kernels=sources.digest(),
        cuda=cuda,
        cublas=sources.cublas_version() if cuda else "",
        driver=sources.driver_version() if cuda else "",
    )
