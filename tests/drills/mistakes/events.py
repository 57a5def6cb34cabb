"""Mistakes in event logs, their histories, and attention over them."""

from tests.drills.mistakes import Mistake

EVENTS = "loka_jax/data/events.py"
JAGGED = "loka_jax/jagged.py"
MODEL = "loka_jax/models/hstu.py"

MISTAKES = [
    Mistake(
        "a history holds the events of the same time",
        EVENTS,
        "            stops = log.before[anchors]\n",
        "            stops = anchors\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "a history holds the example itself",
        EVENTS,
        "            stops = log.before[anchors]\n",
        "            stops = anchors + 1\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "a history begins among the events of another user",
        EVENTS,
        "            starts = np.maximum(log.first[anchors], stops - layout.history)\n",
        "            starts = np.maximum(0, stops - layout.history)\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "a candidate has its actions",
        EVENTS,
        "        ids[is_candidate, ids.shape[1] - len(schema.actions) :] = 0\n",
        "",
        "unit/data/events_test.py",
    ),
    Mistake(
        "a candidate has its answers",
        EVENTS,
        "        answers[is_candidate | ~is_event] = 0\n",
        "        answers[~is_event] = 0\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "the age of a row is the time until the event after it",
        EVENTS,
        "            previous = np.maximum(event - 1, starts[sequence])\n",
        "            previous = np.minimum(event + 1, len(log.times) - 1)\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "positions count from the end of a window",
        EVENTS,
        "log.times[event] - log.times[previous], place\n",
        "log.times[event] - log.times[previous], lengths[sequence] - 1 - place\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "the newest events of a history are left out",
        EVENTS,
        "        return self._gather(anchors, stops - counts, lengths, capacity)\n",
        "        return self._gather(anchors, starts, lengths, capacity)\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "events of one time are ordered by chance",
        EVENTS,
        "    if (ties := log.before != np.arange(len(log.before))).any():\n",
        "    if (ties := log.before != np.arange(len(log.before))).all():\n",
        "unit/data/events_test.py",
    ),
    Mistake(
        "rows of the context see what is to be predicted",
        MODEL,
        "        if context.shape[1] and not is_causal:\n",
        "        if context.shape[1]:\n",
        "unit/models/hstu_test.py",
    ),
    Mistake(
        "candidates see each other",
        JAGGED,
        "    last = jnp.minimum(p.row + 1, p.history_end)\n",
        "    last = p.row + 1\n",
        "unit/ops/jagged_attention_test.py",
    ),
    Mistake(
        "rows see a later row of their sequence",
        JAGGED,
        "    last = jnp.minimum(p.row + 1, p.history_end)\n",
        "    last = jnp.minimum(p.row + 2, p.history_end)\n",
        "unit/ops/jagged_attention_test.py",
    ),
]
