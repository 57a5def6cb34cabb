"""The device, versions and sources that measurements hold for."""

import dataclasses

import jax

from loka_jax.dispatch import sources


@dataclasses.dataclass(frozen=True)
class Header:
    """The device, versions and sources of a table's measurements.

    Attributes:
        device_kind: as JAX names it.
        jax, jaxlib: versions.
        triton: versions of jax-triton and Triton; empty if they are not installed.
        kernels: digest of the sources, see `sources.digest`.
    """

    device_kind: str
    jax: str
    jaxlib: str
    triton: str
    kernels: str

    def why_not(self, here: "Header") -> str | None:
        """Returns which part differs here, or None.

        A machine without Triton runs none of its candidates, and the times of others
        hold there. Patch versions of JAX do not count: its compiler changes with minor
        ones.
        """
        for field in dataclasses.fields(self):
            measured, current = getattr(self, field.name), getattr(here, field.name)
            is_missing = field.name == "triton" and not (measured and current)
            if measured == current or is_missing:
                continue
            if field.name in ("jax", "jaxlib") and _minor(measured) == _minor(current):
                continue
            if field.name == "kernels":
                return "the kernels have changed since"
            name = field.name.replace("_", " ")
            return f"it was measured with {name} {measured}, but here it is {current}"
        return None


def _minor(version: str) -> list[str]:
    """Returns the parts of a version that matter for speed: 0 and 11 of 0.11.2."""
    return version.split(".")[:2]


def header_here() -> Header:
    """Returns the header of a table that holds in this process."""
    return Header(
        device_kind=jax.devices()[0].device_kind,
        jax=jax.__version__,
        jaxlib=sources.version("jaxlib"),
        triton=sources.triton_versions(),
        kernels=sources.digest(),
    )
