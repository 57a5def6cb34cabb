"""What a benchmark of diverging runs reads of what they print."""

from experiments.bench import divergence
from loka_jax.train.watch.alarm import Alarms, Seen


def test_alarms_are_read_as_a_run_prints_them():
    newest = [1.0, 90.0, 90.0, 0.0, 0.0, 20.0, 20.0, 0.0, 0.0, 1.0, 0.0]
    usual = [1.0, 4.0, 4.0, 0.0, 0.0, 20.0, 20.0, 0.0, 0.0, 1.0, 0.0]
    seen = Seen(120, newest, newest, usual, 0.0, 0.0)
    (sentence,) = Alarms().after(1024, {"layer_0/uvqk": seen}).warnings
    beside = "step 1,024 of 2,000  loss 0.5", "step 2: a/b reached 1: most are 0."
    said = "\n".join((beside[0], sentence, beside[1]))

    ((step, site, text),) = divergence.alarms_in(said)

    assert (step, site) == (1024, "layer_0/uvqk")
    assert text.startswith("the kurtosis of its input is 90")
