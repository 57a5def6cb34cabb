"""What tests of Dispatch share: sites, errors, and times that are no device's."""

import dataclasses

from loka_jax import nn
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.header import Header
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.table import MEASURES, Entry, RoleErrors, Table
from loka_jax.group import Dense, Group, Member
from loka_jax.measure.intervals import Interval
from loka_jax.measure.roofline import Roofline
from loka_jax.normed import Epilogue
from loka_jax.ops.plan import resolve_served
from loka_jax.recipe import ROLES, get_recipe
from loka_jax.site import BF16, SiteSpec
from tests.support import stand_ins

HEADER = Header("cpu", "1", "1", "", "x")
ROW = "xla fp8_rowwise"
LIMIT = 1.5 * 0.037  # on the relative L2 of a product
# As measured.
H200 = Roofline(
    bytes_per_us=4.28e6,
    fp8_flops_per_us=1.425e9,
    bf16_flops_per_us=7.85e8,
    launch_us=0.864,
    sms=132,
)
# Products take next to no time on it: the kernels of `copies` only copy.
COPIER = dataclasses.replace(
    stand_ins.ROOFLINE, bf16_flops_per_us=1e12, fp8_flops_per_us=2e12
)
KERNEL = "pallas bf16"


def site(
    path="top/dense_0", m=128, k=64, n=64, recipe="fp8_rowwise", *, batch=None, **spec
) -> nn.Site:
    """Returns a site on a CPU; `spec` has its norm, activation and bias."""
    plan = resolve_served(SiteSpec(m, k, n, **spec), get_recipe(recipe), stand_ins.CPU)
    return nn.Site(path=path, plan=plan, batch=batch)


def in_a_row(*sites: nn.Site) -> list[nn.Site]:
    """Returns sites as a group, in which each reads what the one before makes."""
    layers = tuple(
        Dense(
            reads=i,
            member=Member(site.path, site.spec),
            norm=Epilogue(site.spec.norm, site.spec.activation),
        )
        for i, site in enumerate(sites)
    )
    first, last = sites[0].spec, len(sites)
    group = Group(rows=first.m, inputs=((first.k,),), layers=layers, outputs=(last,))
    return [dataclasses.replace(site, group=group) for site in sites]


def up_to(high: float) -> Interval:
    """Returns an error by its upper end."""
    return Interval(0.5 * high, 0.2 * high, high)


def errors(roles=ROLES, **highs: float) -> RoleErrors:
    """Returns errors in some roles, by the last words of recipes' names."""
    sizes = dict(zip(MEASURES, (1.0, 4.0, 10.0), strict=True))
    found = {
        f"fp8_{name}": {measure: up_to(high * x) for measure, x in sizes.items()}
        for name, high in highs.items()
    }
    return {role: dict(found) if role in roles else {} for role in ROLES}


class EverySite(dict):
    """Times that are the same at any site, as a table has them."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def get(self, spec, default=None):
        """Returns the times of all sites, whatever the site."""
        return Entry({"training": dict(self.times)})


def model_of(sites, times, pass_name="training", **options) -> PerformanceModel:
    """Returns a model with these times of a pass at all sites, and no predictions."""
    entries = {table_key(site.spec): Entry({pass_name: times}) for site in sites}
    return PerformanceModel.of(Table(HEADER, entries), **options)


def copy_us(spec: SiteSpec) -> float:
    """Returns the time of a kernel that moves lhs and y in bfloat16, and launches."""
    return 3.0 + 2 * spec.m * (spec.k + spec.n) / COPIER.bytes_per_us


def copy_sites() -> list[SiteSpec]:
    """Returns sites from which times can be fitted."""
    sizes = [(m, k) for m in (1024, 4096, 65536) for k in (64, 256, 512, 1024)]
    return [SiteSpec(m, k, n, "layer", "swish") for m, k in sizes for n in (128, 512)]


def copies(sites, time=copy_us, header=HEADER) -> Table:
    """Returns the times of XLA's bfloat16 at some sites."""
    entries = {s: Entry({"training": {BF16.name: time(s)}}) for s in sites}
    return Table(header, entries, COPIER)


def fitted() -> Table:
    """Returns times of some candidates in training, from which others are predicted."""
    shares = {BF16.name: 1.0, KERNEL: 0.9, "pallas fp8_rowwise": 0.6, ROW: 1.2}
    entries = {}
    for spec in copy_sites():
        times = {name: share * copy_us(spec) for name, share in shares.items()}
        entries[spec] = Entry({"training": times})
    return Table(HEADER, entries, COPIER)
