"""What tests of predicted times share."""

from loka_jax.measure.roofline import Roofline

# As measured.
H200 = Roofline(
    bytes_per_us=4.28e6,
    fp8_flops_per_us=1.425e9,
    bf16_flops_per_us=7.85e8,
    launch_us=0.864,
    sms=132,
)
